"""Functions of scores in a kernel: which it can compute, and their derivatives, number by number.

A function is traced outside of the kernel, differentiated there, and its primitives are called one
by one on a tile: Mosaic has no rule for some that a function or its derivative has, which others
make up for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.sharding import AbstractMesh

from jaxtrain.scores.function import ScoreFunction

ELEMENTWISE = frozenset(
    (
        *("abs", "add", "and", "broadcast_in_dim", "clamp", "cos", "div", "eq", "exp", "exp2"),
        *("ge", "gt", "le", "log", "logistic", "lt", "max", "min", "mul", "ne", "neg"),
        *("one_minus_square", "or", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt"),
        *("square", "sub", "tanh"),
    )
)
"""Primitives of JAX that compute number by number, and that Mosaic has."""
INNER = ("jaxpr", "call_jaxpr")
"""Names of a program within an equation."""


def with_slopes(
    function: ScoreFunction,
    scores: jax.Array,
    heads: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
) -> list[jax.Array]:
    """Returns the changed scores of a tile, their derivatives by the scores, and by the values of
    heads if the model learns them. All arrays are of one shape."""
    arrays = (scores, heads, queries, keys)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return _evaluate(_traced(function, shapes), arrays)


def function_refusals(function: ScoreFunction | None, heads: int) -> list[str]:
    """Returns the reasons why a kernel cannot compute a function of scores."""
    if function is None:
        return []
    try:
        with jax.ensure_compile_time_eval():
            values = np.asarray(function.of_heads(heads))
    except Exception:  # it may take the model's number of heads alone, and this is a device's
        values = np.zeros(heads, np.float32)
    if refusals := head_refusals(values.shape):
        return refusals
    real, integer = (jax.ShapeDtypeStruct((1, 1), dtype) for dtype in (jnp.float32, jnp.int32))
    value = real if np.issubdtype(values.dtype, np.floating) else integer
    traced = _traced(function, (real, value, integer, integer))
    if any(np.ndim(const) for const in traced.consts):
        return [f"scores={function} reads an array of its own, and only numbers are supported"]
    if unsupported := sorted(set(_unsupported(traced.jaxpr))):
        return [
            f"scores={function} uses {', '.join(unsupported)}, which a kernel does not compute "
            "number by number"
        ]
    return []


def head_refusals(shape: Sequence[int]) -> list[str]:
    """Returns a violation for values of heads [heads, ...] that are not one number each."""
    if len(shape) == 1:
        return []
    return [
        f"the function of scores has values of shape {[*shape[1:]]} for each head, not a number"
    ]


def _traced(function: ScoreFunction, shapes: Sequence[jax.ShapeDtypeStruct]) -> core.ClosedJaxpr:
    def both(score: Any, head: Any, query: Any, key: Any) -> tuple[jax.Array, ...]:
        learned = (head,) if function.trained else ()

        def changed(score: Any, *learned: Any) -> jax.Array:
            value = learned[0] if learned else head
            return function(score, value, query, key).astype(jnp.float32)

        out, pull = jax.vjp(changed, score, *learned)
        return out, *pull(jnp.ones_like(out))

    # Within a shard_map the types of its mesh axes would be in the program.
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        return jax.make_jaxpr(jax.vmap(jax.vmap(both)))(*shapes)


def _evaluate(closed: core.ClosedJaxpr, operands: Sequence[jax.Array]) -> list[jax.Array]:
    jaxpr = closed.jaxpr
    with jax.ensure_compile_time_eval():
        constants = [np.asarray(const)[()] for const in closed.consts]
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *operands], strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else values[var]

    for equation in jaxpr.eqns:
        inputs = [read(var) for var in equation.invars]
        inner = next((equation.params[k] for k in INNER if k in equation.params), None)
        results = _apply(equation, inputs) if inner is None else _evaluate(inner, inputs)
        values.update(zip(equation.outvars, results, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _apply(equation: core.JaxprEqn, inputs: Sequence[jax.Array]) -> list[jax.Array]:
    primitive, params = equation.primitive, equation.params
    if primitive.name in MADE_UP:
        return [MADE_UP[primitive.name](*inputs, params)]
    bound = primitive.bind(*inputs, **params)
    return list(bound) if primitive.multiple_results else [bound]


def _power(x: jax.Array, y: int) -> jax.Array:
    if y < 0:
        return 1 / _power(x, -y)
    return x if y == 1 else lax.integer_pow(x, y)


def _converted(x: jax.Array, params: dict[str, Any]) -> jax.Array:
    if jnp.issubdtype(params["new_dtype"], jnp.bool_):
        return x != 0
    return lax.convert_element_type(x, params["new_dtype"])


def _negated(x: jax.Array, _: Any) -> jax.Array:
    return jnp.where(x, 0, 1) != 0 if x.dtype == bool else ~x


MADE_UP: dict[str, Callable[..., jax.Array]] = {
    "add_any": lambda a, b, _: a + b,
    "convert_element_type": _converted,
    "copy": lambda x, _: x,
    "expm1": lambda x, _: jnp.exp(x) - 1,
    "integer_pow": lambda x, params: _power(x, params["y"]),
    "is_finite": lambda x, _: jnp.abs(x) < jnp.inf,
    "log1p": lambda x, _: jnp.log(1 + x),
    "not": _negated,
    "stop_gradient": lambda x, _: x,
}
"""By the name of a primitive, what computes it in a kernel instead."""


def _unsupported(jaxpr: core.Jaxpr) -> Iterator[str]:
    """Yields the primitives that a kernel cannot compute."""
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        inner = [equation.params[k] for k in INNER if k in equation.params]
        operands: list[Any] = [var.aval for var in equation.invars]
        kinds = {np.dtype(operand.dtype).kind for operand in operands}
        if inner:
            yield from _unsupported(getattr(inner[0], "jaxpr", inner[0]))
        elif name == "rem" and "f" in kinds:
            yield "rem of fractions"
        elif name in ("max", "min") and "b" in kinds:
            yield f"{name} of truth values"
        elif name == "select_n" and len(operands) > 3:
            yield "select_n of several cases"
        elif name not in ELEMENTWISE and name not in MADE_UP:
            yield name
