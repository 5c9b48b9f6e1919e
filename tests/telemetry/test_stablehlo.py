"""Programs as they are handed to XLA: what they send, and in what dtype."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.program.collectives import Collective, collectives
from jaxtrain.program.stablehlo import lowered_collectives


def lowered(function: Any, dtype: str) -> Any:
    """`function` on every device of a 2 x 4 mesh, on an array [8, 6]."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(run).lower(jax.ShapeDtypeStruct((8, 6), dtype))


def hop(x: jax.Array, axis: Any) -> jax.Array:
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


KINDS = {
    "psum": lax.psum,
    "pmax": lax.pmax,
    "psum_scatter": partial(lax.psum_scatter, tiled=True),
    "all_gather": lax.all_gather,
    "all_to_all": partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
    "ppermute": hop,
}


def told(each: Collective) -> tuple[Any, ...]:
    groups = {tuple(sorted(group)) for group in each.groups}
    return each.kind, each.dtype, each.buffer_bytes, each.wire_bytes, groups, each.count


@pytest.mark.parametrize("axes", ["a", "b", ("a", "b")], ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_it_is_what_a_compiler_reads_that_widens_nothing(name: str, axes: Any) -> None:
    program = lowered(lambda x: KINDS[name](x, axes), "float32")
    before, after = lowered_collectives(program), collectives(program.compile().as_text())
    assert [told(each) for each in before] == [told(each) for each in after] != []


def ragged(x: jax.Array, places: int) -> jax.Array:
    """Two of the rows of x to each of the four devices along b."""
    two = jnp.full(4, 2)
    at = jnp.arange(4) * 2
    where = jnp.full(4, 2 * lax.axis_index("b"))
    empty = jnp.zeros((places, 6), x.dtype)
    return lax.ragged_all_to_all(x, empty, at, two, where, two, axis_name="b")


@pytest.mark.parametrize("places", [8, 32, 5])
def test_a_ragged_all_to_all_moves_what_both_arrays_have_at_the_most(places: int) -> None:
    (found,) = lowered_collectives(lowered(lambda x: ragged(x, places), "float32"))
    size = min(8, places) * 6 * 4
    groups = {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert told(found) == ("ragged-all-to-all", "f32", size, size * 3 / 4, groups, 1)
    text = f"""HloModule ragged, num_partitions=8

ENTRY main (x: f32[8,6], out: f32[{places},6], n: s32[4]) -> f32[{places},6] {{
  x = f32[8,6] parameter(0)
  out = f32[{places},6] parameter(1)
  n = s32[4] parameter(2)
  ROOT came = f32[{places},6] ragged-all-to-all(x, out, n, n, n, n), channel_id=1, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
}}
"""  # noqa: E501
    (after,) = collectives(text)
    assert told(after) == told(found)


DTYPES = {
    "bfloat16": "bf16",
    "float16": "f16",
    "float32": "f32",
    "float8_e4m3fn": "f8e4m3fn",
    "int8": "s8",
    "uint8": "u8",
    "int32": "s32",
    "bool": "pred",
}


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_is_the_sources(dtype: str) -> None:
    """XLA:CPU makes fp32 of 16-bit sums; that is not here yet."""
    [found] = lowered_collectives(lowered(lambda x: lax.all_gather(x, "b"), dtype))
    assert (found.dtype, found.buffer_bytes) == (DTYPES[dtype], 4 * 48 * jnp.dtype(dtype).itemsize)


def test_loops_multiply_and_branches_count_as_if_always_taken() -> None:
    def step(x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, _: Any) -> Any:
            return hop(x, "a"), None

        def outer(x: jax.Array, row: jax.Array) -> Any:
            x = lax.cond(row > 3, lambda x: lax.psum(x, "b"), lambda x: x, x)
            return lax.scan(inner, x, length=3)[0], None

        x = lax.fori_loop(2, 9, lambda _, x: lax.pmax(x, "a"), x)
        return lax.scan(jax.checkpoint(outer), x, jnp.arange(5))[0]

    found = lowered_collectives(lowered(step, "float32"))
    assert [(each.kind, each.count, each.in_branch) for each in found] == [
        ("all-reduce", 7, False),
        ("all-reduce", 5, True),
        ("collective-permute", 15, False),
    ]


@pytest.mark.parametrize(("start", "bound", "step"), [(0, 7, 1), (2, 9, 3), (5, 5, 1)])
def test_counters_of_any_start_and_step(start: int, bound: int, step: int) -> None:
    def loop(x: jax.Array) -> jax.Array:
        def turn(state: Any) -> Any:
            return state[0] + step, lax.psum(state[1], "a")

        return lax.while_loop(lambda state: state[0] < bound, turn, (start, x))[1]

    [found] = lowered_collectives(lowered(loop, "float32"))
    assert found.count == len(range(start, bound, step))


def test_a_loop_over_data_is_refused_only_if_it_sends() -> None:
    def until(turn: Any) -> Any:
        return lambda x: lax.while_loop(lambda x: x.sum() < 10, turn, x)

    assert lowered_collectives(lowered(until(lambda x: x + 1), "float32")) == []
    with pytest.raises(ValueError, match="no trip count"):
        lowered_collectives(lowered(until(lambda x: lax.psum(x, "a")), "float32"))
