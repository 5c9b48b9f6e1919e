"""Checks that no collective stands in a branch whose predicate differs between its devices.

Devices that take different branches wait for each other for ever or, with permutes, compute wrong
gradients without an error. The types of a traced program state over which mesh axes a value may
vary, so this is checked before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jax.extend.core import jaxprs_in_params

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

_AXES = ("axes", "axis_name")


def branch_violations(jaxpr: ClosedJaxpr | Jaxpr) -> list[str]:
    """Each collective of a traced step (`jax.make_jaxpr`) that stands in a `cond` or a `while`
    whose predicate varies over one of its own mesh axes.

    Needs the types of `check_vma=True`; a shard_map without them reports nothing.
    """
    # ClosedJaxpr is Jaxpr itself from jax 0.11 on.
    inner: Any = getattr(jaxpr, "jaxpr", jaxpr)
    return list(_in(inner))


def _in(jaxpr: Jaxpr) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        inner = list(jaxprs_in_params(eqn.params))
        if name == "cond":
            yield from _crossing("cond", _varying(eqn.invars[0]), inner)
        elif name == "while":
            condition = eqn.params["cond_jaxpr"].jaxpr
            yield from _crossing("while", _varying(condition.outvars[0]), inner)
        for child in inner:
            yield from _in(child)


def _crossing(kind: str, varying: frozenset[str], inner: list[Jaxpr]) -> Iterator[str]:
    for name, axes in (pair for child in inner for pair in _collectives(child)):
        if shared := sorted(varying & set(axes)):
            yield (
                f"{name} over {', '.join(axes)} stands in a {kind} whose predicate varies over "
                f"{', '.join(shared)}: devices would wait for those that went the other way. Take "
                f"it out of the branch and mask its result with jnp.where, or make the predicate "
                f"equal on all of them"
            )


def _collectives(jaxpr: Jaxpr) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields (name, mesh axes) of every collective at any depth. `axis_index` sends nothing."""
    for eqn in jaxpr.eqns:
        named = next((eqn.params[key] for key in _AXES if eqn.params.get(key) is not None), None)
        axes = tuple(a for a in _tuple(named) if isinstance(a, str))
        if axes and eqn.primitive.name not in ("axis_index", "pcast", "pvary"):
            yield eqn.primitive.name, axes
        for child in jaxprs_in_params(eqn.params):
            yield from _collectives(child)


def _varying(variable: Var | Literal) -> frozenset[str]:
    kind = getattr(variable.aval, "manual_axis_type", None)
    return frozenset() if kind is None else frozenset(kind.varying)


def _tuple(value: object) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
