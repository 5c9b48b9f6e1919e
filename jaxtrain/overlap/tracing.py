"""A traced function as a flat list of operations, to be run one at a time in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.core import ShapedArray
from jax.extend import core
from jax.tree_util import PyTreeDef
from jaxtyping import PyTree

INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
)
"""Calls that are replaced by the operations within them."""
REMATERIALISED = frozenset({"checkpoint", "remat", "remat2"})
"""Calls that are replaced likewise, behind a barrier: recomputation must not be merged with the
first computation."""


class TracedOperation(NamedTuple):
    """An equation of a jaxpr (None: a barrier), the numbers of its operands and results, and its
    scope: the names it was traced under, including those of the calls around it."""

    equation: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    scope: str = ""

    @property
    def name(self) -> str:
        """Name of the primitive."""
        return "barrier" if self.equation is None else self.equation.primitive.name

    @property
    def is_permute(self) -> bool:
        return self.name == "ppermute"

    @property
    def has_permutes(self) -> bool:
        """True for a permute and for an operation that contains one."""
        return self.equation is not None and "ppermute" in _names(self.equation)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends in a permute."""
        return sum(var.aval.size * var.aval.dtype.itemsize for var in self.equation.invars)

    @property
    def flops(self) -> int | None:
        """FLOPs of the operation's matrix products, 0 if it has none. A scan counts all its turns,
        a `cond` its cheapest branch, and a Pallas kernel the FLOPs that it states; None if a kernel
        states none."""
        return 0 if self.equation is None else _flops(self.equation)


def _names(equation: Any) -> set[str]:
    within = (inner for jaxpr in core.jaxprs_in_params(equation.params) for inner in jaxpr.eqns)
    return {equation.primitive.name}.union(*map(_names, within))


def _flops(equation: Any) -> int | None:
    name, params = equation.primitive.name, equation.params
    if name == "pallas_call":
        return getattr(params.get("cost_estimate"), "flops", None)
    if name in ("dot_general", "ragged_dot_general"):
        return _product_flops(equation)
    within = [[_flops(inner) for inner in jaxpr.eqns] for jaxpr in core.jaxprs_in_params(params)]
    if any(None in counts for counts in within):
        return None
    totals = [sum(filter(None, counts)) for counts in within]
    if name == "cond":
        return min(totals)
    return sum(totals) * (params["length"] if name == "scan" else 1)


def _product_flops(equation: Any) -> int:
    """FLOPs of a product. A ragged one multiplies groups of rows or, in a backward pass, sums over
    them."""
    names = equation.params.get("ragged_dot_dimension_numbers")
    numbers = equation.params["dimension_numbers"] if names is None else names.dot_dimension_numbers
    (contracted, _), _ = numbers
    inner = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
    result = math.prod(equation.outvars[0].aval.shape)
    if names is None or names.lhs_ragged_dimensions[0] not in contracted:
        return 2 * result * inner
    return 2 * inner * result // equation.invars[2].aval.shape[-1]


@dataclass
class TracedProgram:
    """A traced function.

    operations: in the order of tracing, without those whose results nothing reads.
    outputs, tree: the numbers of the returned values, and their structure.
    values: by number, the values that are computed so far.
    read: the numbers of the values that something reads.
    """

    operations: list[TracedOperation]
    outputs: list[int]
    tree: PyTreeDef
    values: dict[int, Any] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def run(self, operation: TracedOperation) -> None:
        """Computes an operation's results."""
        self.give(operation.results, compute(operation, self.take(operation.operands)))

    def take(self, numbers: Sequence[int]) -> list[Any]:
        return [self.values[number] for number in numbers]

    def give(self, numbers: Sequence[int], values: Sequence[Any]) -> None:
        self.values.update(zip(numbers, values, strict=True))

    def result(self) -> PyTree:
        """Returns the function's output, once all operations have run."""
        return jax.tree.unflatten(self.tree, self.take(self.outputs))


def trace(function: Callable[..., PyTree], arguments: tuple[Any, ...]) -> TracedProgram:
    """Returns the program of `function`, with its arguments among the values."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    program = TracedProgram([], [], jax.tree.structure(shape))
    fresh = count()

    def number_of(value: Any) -> int:
        number = next(fresh)
        program.values[number] = value
        return number

    def flatten(closed: core.ClosedJaxpr, operands: Sequence[int], outer: str) -> list[int]:
        jaxpr = closed.jaxpr
        constants = [number_of(constant) for constant in closed.consts]
        numbers = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))

        def read(var: Any) -> int:
            return number_of(var.val) if isinstance(var, core.Literal) else numbers[var]

        for equation in jaxpr.eqns:
            inputs = tuple(read(var) for var in equation.invars)
            name, own = equation.primitive.name, str(equation.source_info.name_stack)
            scope = "/".join(filter(None, (outer, own)))
            if name in REMATERIALISED:
                behind = tuple(next(fresh) for _ in inputs)
                program.operations.append(TracedOperation(None, inputs, behind))
                inputs = behind
            if name in INLINED | REMATERIALISED:
                results = flatten(_called(equation), inputs, scope)
            else:
                results = [next(fresh) for _ in equation.outvars]
                barrier = name == "optimization_barrier"
                operation = None if barrier else equation
                program.operations.append(TracedOperation(operation, inputs, tuple(results), scope))
            numbers.update(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    leaves = [number_of(leaf) for leaf in jax.tree.leaves(arguments)]
    program.outputs = flatten(closed, leaves, "")
    _drop_unread(program)
    return program


def _called(equation: Any) -> core.ClosedJaxpr:
    inner = next(equation.params[k] for k in ("jaxpr", "call_jaxpr") if k in equation.params)
    return inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())


def _drop_unread(program: TracedProgram) -> None:
    """Removes operations whose results nothing reads, unless they have effects, and the unread
    operands of barriers, as compilers do."""
    read, live = set(program.outputs), []
    for operation in reversed(program.operations):
        if operation.equation is None:
            operation = _read_part(operation, read)
        effects = () if operation.equation is None else operation.equation.effects
        # JAX lists the mesh axes of a collective as an effect, though it has only results.
        acts = any(type(effect).__name__ != "NamedAxisEffect" for effect in effects)
        if acts or not read.isdisjoint(operation.results):
            read.update(operation.operands)
            live.append(operation)
    program.operations, program.read = live[::-1], read


def _read_part(barrier: TracedOperation, read: set[int]) -> TracedOperation:
    """The barrier with only those operands whose results are read."""
    pairs = zip(barrier.operands, barrier.results, strict=True)
    live = [(operand, result) for operand, result in pairs if result in read]
    return TracedOperation(None, tuple(pair[0] for pair in live), tuple(pair[1] for pair in live))


def _of_one_type(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Returns the operands; if when the equation was traced all could differ over the same mesh
    axes, they are typed so again. A residual that was in a buffer of a pipeline may differ between
    stages, as far as types know, and other operands beside it not."""
    avals = [var.aval for var in equation.invars]
    typed = all(isinstance(aval, ShapedArray) for aval in avals)
    if not typed or len({aval.manual_axis_type.varying for aval in avals}) != 1:
        return operands
    axes = frozenset[str]().union(*map(_varying, operands))
    return [_vary(x, tuple(sorted(axes))) for x in operands]


def _varying(x: Any) -> frozenset[str]:
    return jax.typeof(x).manual_axis_type.varying


def _vary(x: Any, axes: Sequence[str]) -> Any:
    """Types x as varying over `axes` too."""
    missing = tuple(axis for axis in axes if axis not in _varying(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def compute(operation: TracedOperation, operands: Sequence[Any]) -> list[Any]:
    """Returns an operation's results, under the names and settings it was traced with."""
    if operation.equation is None:
        return list(lax.optimization_barrier(tuple(operands)))
    equation = operation.equation
    if operation.name == "pvary":
        return [_vary(operands[0], equation.params["axes"])]
    operands = _of_one_type(equation, operands)
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with ExitStack() as scopes:
        scopes.enter_context(equation.ctx.manager)
        if operation.scope:
            scopes.enter_context(jax.named_scope(operation.scope))
        result = equation.primitive.bind(*functions, *operands, **params)
    return list(result) if equation.primitive.multiple_results else [result]
