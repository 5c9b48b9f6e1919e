"""Where permutes stand in a traced program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Of a jaxpr and all that its equations hold."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from all_equations(inner)


def bodies(jaxpr: Any) -> list[list[Any]]:
    """The equations of a jaxpr and of each loop in it, those of calls not among them."""
    loops = [e for e in all_equations(jaxpr) if e.primitive.name in ("scan", "shard_map")]
    return [list(each.eqns) for each in (jaxpr, *(e.params["jaxpr"] for e in loops))]


def tied_permutes(equations: list[Any]) -> list[tuple[int, int]]:
    """Of each permute that starts with a product and ends with one, the numbers of both: it waits
    for what the first waits for, and nobody reads the second before it has arrived."""
    products = [e for e in equations if e.primitive.name == "dot_general"]
    made = {id(var): e for e in equations for var in e.outvars}
    barriers = [e for e in equations if e.primitive.name == "optimization_barrier"]
    found = []
    for permute in (e for e in equations if e.primitive.name == "ppermute"):
        before = made.get(id(permute.invars[0]))
        if before not in barriers:
            continue
        after = [e for e in barriers if permute.outvars[0] in e.invars]
        together = set(map(id, before.outvars))
        first = [i for i, p in enumerate(products) if set(map(id, p.invars)) & together]
        last = [i for i, p in enumerate(products) for e in after if p.outvars[0] in e.invars]
        if not (first and last):
            continue
        read = {id(var) for e in equations if e not in after for var in e.invars}
        assert not {id(permute.outvars[0]), id(products[last[0]].outvars[0])} & read
        found.append((first[0], last[0]))
    return found
