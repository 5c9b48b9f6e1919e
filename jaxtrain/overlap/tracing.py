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
from jax.extend import core
from jax.tree_util import PyTreeDef
from jaxtyping import PyTree

INLINED = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call"}
)
"""Calls of which the operations within are listed."""
REMATERIALISED = frozenset({"checkpoint", "remat", "remat2"})
"""The same, behind a barrier: what they compute again must not be merged with the first time."""


class Operation(NamedTuple):
    """An equation of a jaxpr (None: a barrier), the numbers of its operands and results, and the
    names it was traced under, those of calls around it among them."""

    equation: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    scope: str = ""

    @property
    def name(self) -> str:
        """The primitive's."""
        return "barrier" if self.equation is None else self.equation.primitive.name

    @property
    def is_permute(self) -> bool:
        return self.name == "ppermute"

    @property
    def has_permutes(self) -> bool:
        """Whether it is one, or has some within."""
        return self.equation is not None and "ppermute" in _names(self.equation)

    @property
    def sent_bytes(self) -> int:
        """What a device sends in a permute."""
        return sum(var.aval.size * var.aval.dtype.itemsize for var in self.equation.invars)

    @property
    def flops(self) -> int | None:
        """Of products of matrices, those of a scan's turns and of the least branch of a choice
        too; of a kernel what it states, None where it states none; 0 of all else."""
        return 0 if self.equation is None else _flops(self.equation)


def _names(equation: Any) -> set[str]:
    within = (each for jaxpr in core.jaxprs_in_params(equation.params) for each in jaxpr.eqns)
    return {equation.primitive.name}.union(*map(_names, within))


def _flops(equation: Any) -> int | None:
    name, params = equation.primitive.name, equation.params
    if name == "pallas_call":
        return getattr(params.get("cost_estimate"), "flops", None)
    if name in ("dot_general", "ragged_dot_general"):
        return _product_flops(equation)
    within = [[_flops(each) for each in jaxpr.eqns] for jaxpr in core.jaxprs_in_params(params)]
    if any(each is None for several in within for each in several):
        return None
    totals = [sum(filter(None, several)) for several in within]
    if name == "cond":
        return min(totals)
    return sum(totals) * (params["length"] if name == "scan" else 1)


def _product_flops(equation: Any) -> int:
    """Of a product, which may be of groups of rows or, in a backward pass, over them."""
    names = equation.params.get("ragged_dot_dimension_numbers")
    numbers = equation.params["dimension_numbers"] if names is None else names.dot_dimension_numbers
    (contracted, _), _ = numbers
    inner = math.prod(equation.invars[0].aval.shape[dim] for dim in contracted)
    result = math.prod(equation.outvars[0].aval.shape)
    if names is None or names.lhs_ragged_dimensions[0] not in contracted:
        return 2 * result * inner
    return 2 * inner * result // equation.invars[2].aval.shape[-1]


@dataclass
class Program:
    """Operations in the order in which they were traced, without those that nothing reads; the
    numbers of all values that something reads; and the values that are known, by number."""

    operations: list[Operation]
    outputs: list[int]
    tree: PyTreeDef
    values: dict[int, Any] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def run(self, operation: Operation) -> None:
        """Compute an operation's results."""
        self.give(operation.results, compute(operation, self.take(operation.operands)))

    def take(self, numbers: Sequence[int]) -> list[Any]:
        return [self.values[number] for number in numbers]

    def give(self, numbers: Sequence[int], values: Sequence[Any]) -> None:
        self.values.update(zip(numbers, values, strict=True))

    def result(self) -> PyTree:
        """What the function returns, once all operations have run."""
        return jax.tree.unflatten(self.tree, self.take(self.outputs))


def trace(function: Callable[..., PyTree], arguments: tuple[Any, ...]) -> Program:
    """The program of `function`, its arguments given."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    program = Program([], [], jax.tree.structure(shape))
    fresh = count()

    def number_of(value: Any) -> int:
        number = next(fresh)
        program.values[number] = value
        return number

    def flatten(closed: core.ClosedJaxpr, operands: Sequence[int], outer: str) -> list[int]:
        jaxpr = closed.jaxpr
        constants = [number_of(each) for each in closed.consts]
        numbers = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))

        def read(var: Any) -> int:
            return number_of(var.val) if isinstance(var, core.Literal) else numbers[var]

        for equation in jaxpr.eqns:
            given = tuple(read(var) for var in equation.invars)
            name, own = equation.primitive.name, str(equation.source_info.name_stack)
            scope = "/".join(filter(None, (outer, own)))
            if name in REMATERIALISED:
                behind = tuple(next(fresh) for _ in given)
                program.operations.append(Operation(None, given, behind))
                given = behind
            if name in INLINED | REMATERIALISED:
                results = flatten(_called(equation), given, scope)
            else:
                results = [next(fresh) for _ in equation.outvars]
                kept = None if name == "optimization_barrier" else equation
                program.operations.append(Operation(kept, given, tuple(results), scope))
            numbers.update(zip(equation.outvars, results, strict=True))
        return [read(var) for var in jaxpr.outvars]

    given = [number_of(each) for each in jax.tree.leaves(arguments)]
    program.outputs = flatten(closed, given, "")
    _drop_unread(program)
    return program


def _called(equation: Any) -> core.ClosedJaxpr:
    inner = next(equation.params[k] for k in ("jaxpr", "call_jaxpr") if k in equation.params)
    return inner if hasattr(inner, "consts") else core.ClosedJaxpr(inner, ())


def _drop_unread(program: Program) -> None:
    """Leave the operations of which something reads a result, or that do more than give one; of a
    barrier what is read behind it, as compilers do."""
    read, live = set(program.outputs), []
    for every in reversed(program.operations):
        each = _of_barrier(every, read) if every.equation is None else every
        effects = () if each.equation is None else each.equation.effects
        # Of a collective JAX names its mesh axes as an effect; it does nothing but give results.
        acts = any(type(effect).__name__ != "NamedAxisEffect" for effect in effects)
        if acts or not read.isdisjoint(each.results):
            read.update(each.operands)
            live.append(each)
    program.operations, program.read = live[::-1], read


def _of_barrier(barrier: Operation, read: set[int]) -> Operation:
    """The part of a barrier behind which something is read."""
    pairs = zip(barrier.operands, barrier.results, strict=True)
    kept = [(before, behind) for before, behind in pairs if behind in read]
    return Operation(None, tuple(pair[0] for pair in kept), tuple(pair[1] for pair in kept))


def compute(operation: Operation, operands: Sequence[Any]) -> list[Any]:
    """An operation's results, under the names and settings it was traced with."""
    if operation.equation is None:
        return list(lax.optimization_barrier(tuple(operands)))
    equation = operation.equation
    params = equation.primitive.get_bind_params(equation.params)
    functions, params = params if isinstance(params, tuple) else ((), params)
    with ExitStack() as scopes:
        scopes.enter_context(equation.ctx.manager)
        if operation.scope:
            scopes.enter_context(jax.named_scope(operation.scope))
        result = equation.primitive.bind(*functions, *operands, **params)
    return list(result) if equation.primitive.multiple_results else [result]
