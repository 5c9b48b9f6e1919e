"""What a compiled program says of its own branches: each counts as often as it is taken."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtrain.program.collectives import collectives, dot_flops
from jaxtrain.program.text import program_text

SQUARE = 2 * 4**3
"""FLOPs of a product of two 4 x 4 matrices."""


def text_of(function: Any, *more: Any) -> str:
    return program_text(jax.jit(function).lower(jnp.eye(4), *more).compile())


def squared(x: jax.Array) -> jax.Array:
    return jnp.sin(x @ x)


def same(x: jax.Array) -> jax.Array:
    return x


def following(table: np.ndarray, take: Any) -> Any:
    """A loop over a table's rows."""

    def run(x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, row: (take(row, x), None), x, jnp.asarray(table, jnp.int32))[0]

    return run


RANDOM = np.random.default_rng(0).integers(-3, 4, (300, 2))
TABLES = {
    "some": np.array([-1, 0, 1, -1, 2]),
    "none": np.array([-1, -1, -1, -2]),
    "all": np.array([3, 0, 1, 2]),
    "one turn": np.array([0]),
    "longer than a printer shows": RANDOM[:, 0],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_branch_counts_as_often_as_its_table_opens_it(name: str) -> None:
    table = TABLES[name]
    run = following(table, lambda row, x: lax.cond(row >= 0, squared, same, x))
    assert dot_flops(text_of(run)) == SQUARE * (table >= 0).sum()


PREDICATES = {
    "of two columns": lambda row: (row[0] > 0) & (row[1] != 2),
    "of either": lambda row: (row[0] == 1) | ~(row[1] > -2),
    "arithmetic": lambda row: jnp.maximum(row[0] * 2 - row[1], -row[0]) >= 3,
    "a choice": lambda row: jnp.where(row[0] > 0, row[1], row[0]) < 0,
}


@pytest.mark.parametrize("name", PREDICATES)
def test_predicates_are_arithmetic_on_tables(name: str) -> None:
    predicate = PREDICATES[name]
    run = following(RANDOM, lambda row, x: lax.cond(predicate(row), squared, same, x))
    taken = sum(bool(predicate(row)) for row in RANDOM)
    assert 0 < taken < len(RANDOM)
    assert dot_flops(text_of(run)) == SQUARE * taken


def test_of_several_branches_each_counts_for_itself() -> None:
    """A number beyond the last branch takes the last, as XLA has it."""
    branches = [same, squared, lambda x: squared(squared(x))]
    run = following(RANDOM[:, 0], lambda row, x: lax.switch(row, branches, x))
    numbers = np.clip(RANDOM[:, 0], 0, 2)
    assert dot_flops(text_of(run)) == SQUARE * numbers.sum()


def test_a_branch_within_a_branch_counts_where_both_are_taken() -> None:
    def take(row: jax.Array, x: jax.Array) -> jax.Array:
        def inner(x: jax.Array) -> jax.Array:
            return lax.cond(row[1] > 0, squared, jnp.cos, jnp.tanh(x @ x))

        return lax.cond(row[0] > 0, inner, same, x)

    first, both = RANDOM[:, 0] > 0, (RANDOM > 0).all(1)
    assert dot_flops(text_of(following(RANDOM, take))) == SQUARE * (first.sum() + both.sum())


def test_a_loop_in_a_branch_and_a_branch_in_a_loop_of_loops() -> None:
    def thrice(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 3, lambda _, x: squared(x), x)

    table = TABLES["some"]
    inner = following(table, lambda row, x: lax.cond(row >= 0, thrice, same, x))

    def run(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 5, lambda _, x: inner(x), x)

    assert dot_flops(text_of(run)) == SQUARE * 5 * 3 * (table >= 0).sum()


def test_a_counter_of_the_programs_own_is_followed() -> None:
    """Carried from turn to turn, beside the loop's: in turn i it is 3 i + 1."""

    def flops(opened: Any) -> float:
        def turn(_: Any, carried: Any) -> Any:
            x, count = carried
            return lax.cond(opened(count), squared, same, x), count + 3

        return dot_flops(text_of(lambda x: lax.fori_loop(0, 9, turn, (x, 1))[0]))

    assert flops(lambda count: count > 10) == SQUARE * 5
    # A division is none of the operations that are done: the dearest branch, in every turn.
    assert flops(lambda count: lax.div(count, 7) > 2) == SQUARE * 9


UNKNOWN = {
    "an argument": lambda x, rows: following_rows(rows, x, lambda row, x: row >= 0),
    "data": lambda x, rows: following_rows(rows * 0, x, lambda row, x: x.sum() > row),
}


def following_rows(rows: jax.Array, x: jax.Array, opened: Any) -> jax.Array:
    return lax.scan(lambda x, r: (lax.cond(opened(r, x), squared, same, x), None), x, rows)[0]


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_hangs_on_data_counts_as_often_as_it_may(name: str) -> None:
    text = text_of(UNKNOWN[name], jnp.arange(-2, 5))
    assert dot_flops(text) == SQUARE * 7


def test_a_table_that_is_not_printed_is_not_guessed() -> None:
    table = TABLES["longer than a printer shows"]
    run = following(table, lambda row, x: lax.cond(row >= 0, squared, same, x))
    text = re.sub(
        r"s32\[300\]\{0\} constant\(\{.*?\}\)", "s32[300]{0} constant({...})", text_of(run)
    )
    assert "{...}" in text and dot_flops(text) == SQUARE * 300


def test_collectives_in_a_branch_that_is_read_are_in_none() -> None:
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    table = TABLES["some"]

    def step(x: jax.Array) -> jax.Array:
        known = following(table, lambda row, x: lax.cond(row >= 0, summed, same, x))(x)
        return lax.cond(known.sum() > 0, summed, same, known)

    def summed(x: jax.Array) -> jax.Array:
        return lax.psum(jnp.sin(x), "a")

    spec = jax.sharding.PartitionSpec()
    run = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    found = [(each.count, each.in_branch) for each in collectives(text_of(run))]
    assert sorted(found) == [(1, True), (3, False)]


TPU = """HloModule step, is_scheduled=true

%more (state: (s32[], s32[6], f32[4,4])) -> pred[] {
  %state = (s32[], s32[6]{0}, f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %bound = s32[] constant(6)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

%yes (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  ROOT %dot = f32[4,4]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%no (x: f32[4,4]) -> f32[4,4] {
  ROOT %x = f32[4,4]{1,0} parameter(0)
}

%turn (state: (s32[], s32[6], f32[4,4])) -> (s32[], s32[6], f32[4,4]) {
  %state = (s32[], s32[6]{0}, f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %table = s32[6]{0} get-tuple-element(%state), index=1
  %x = f32[4,4]{1,0} get-tuple-element(%state), index=2
  %row = s32[1]{0} dynamic-slice(%table, %i), dynamic_slice_sizes={1}
  %at = s32[] bitcast(%row)
  %zero = s32[] constant(0)
  %open = pred[] compare(%at, %zero), direction=GE
  %y = f32[4,4]{1,0} conditional(%open, %x, %x), true_computation=%yes, false_computation=%no
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %after = (s32[], s32[6]{0}, f32[4,4]{1,0}) tuple(%next, %table, %y)
}

ENTRY %main (x: f32[4,4]) -> f32[4,4] {
  %x = f32[4,4]{1,0} parameter(0)
  %start = s32[] constant(0)
  %constant = s32[6]{0} constant({-1, -1, 1, -1, -2, 3})
  %copy-start = (s32[6]{0}, s32[6]{0}, u32[]) copy-start(%constant)
  %copy-done = s32[6]{0} copy-done(%copy-start)
  %state = (s32[], s32[6]{0}, f32[4,4]{1,0}) tuple(%start, %copy-done, %x)
  %loop = (s32[], s32[6]{0}, f32[4,4]{1,0}) while(%state), condition=%more, body=%turn
  ROOT %y = f32[4,4]{1,0} get-tuple-element(%loop), index=2
}
"""


def test_a_tpu_hands_its_tables_to_the_loop() -> None:
    """There they are moved to another memory first, and pass from turn to turn."""
    assert dot_flops(TPU) == SQUARE * 2
    turned = TPU.replace("tuple(%next, %table, %y)", "tuple(%next, %other, %y)").replace(
        "  %one = s32[] constant(1)",
        "  %other = s32[6]{0} negate(%table)\n  %one = s32[] constant(1)",
    )
    # In odd turns, 1, 3 and 5, the signs are others.
    assert dot_flops(turned) == SQUARE * 3


def test_a_number_that_is_no_branch_takes_the_last_one() -> None:
    """As XLA has it, below zero too."""
    numbered = TPU.replace("conditional(%open", "conditional(%at").replace(
        "true_computation=%yes, false_computation=%no", "branch_computations={%no, %no, %yes}"
    )
    assert dot_flops(numbered) == SQUARE * 5  # but for the one 1


def test_a_number_beyond_its_type_is_not_guessed() -> None:
    """It would wrap around in the program."""
    added = "  %most = s32[] constant(2147483647)\n  %sum = s32[] add(%at, %most)\n  %zero ="
    below = TPU.replace("compare(%at, %zero), direction=GE", "compare(%sum, %zero), direction=LT")
    beyond = below.replace("  %zero =", added)
    assert dot_flops(beyond) == SQUARE * 6
    assert dot_flops(beyond.replace("2147483647", "2147483644")) == 0
    assert dot_flops(beyond.replace("2147483647", "-2")) == SQUARE * 5


OUTER = """%again (state: (s32[], s32[6], f32[4,4])) -> (s32[], s32[6], f32[4,4]) {
  %state = (s32[], s32[6]{0}, f32[4,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %table = s32[6]{0} get-tuple-element(%state), index=1
  %x = f32[4,4]{1,0} get-tuple-element(%state), index=2
  %start = s32[] constant(0)
  %inner = (s32[], s32[6]{0}, f32[4,4]{1,0}) tuple(%start, %table, %x)
  %loop = (s32[], s32[6]{0}, f32[4,4]{1,0}) while(%inner), condition=%more, body=%turn
  %y = f32[4,4]{1,0} get-tuple-element(%loop), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %after = (s32[], s32[6]{0}, f32[4,4]{1,0}) tuple(%next, %table, %y)
}

ENTRY"""


def test_a_table_comes_through_a_loop_around_if_that_keeps_it() -> None:
    nested = TPU.replace("body=%turn", "body=%again").replace("ENTRY", OUTER)
    assert dot_flops(nested) == SQUARE * 6 * 2
    changed = nested.replace(
        "  %start = s32[] constant(0)\n  %inner",
        "  %start = s32[] constant(0)\n  %other = s32[6]{0} negate(%table)\n  %inner",
    ).replace("tuple(%next, %table, %y)\n}\n\nENTRY", "tuple(%next, %other, %y)\n}\n\nENTRY")
    assert dot_flops(changed) == SQUARE * 6 * 6
