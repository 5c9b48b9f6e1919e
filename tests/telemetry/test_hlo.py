"""The reader of compiled programs against closed forms and against XLA's own analysis."""

from __future__ import annotations

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.program.collectives import collectives, dot_flops, opaque_kernels, peak_memory
from jaxtrain.telemetry.flops import AttentionFlops, Matmul, forward_flops

DEVICES = np.arange(8).reshape(2, 4)  # mesh axes a, b
GROUPS = {
    "a": {tuple(map(int, column)) for column in DEVICES.T},
    "b": {tuple(map(int, row)) for row in DEVICES},
    "ab": {tuple(range(8))},
}


def arrays(*shapes: tuple[int, ...]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]


def text_of(function, *shapes: tuple[int, ...]) -> str:
    return jax.jit(function).lower(*arrays(*shapes)).compile().as_text()


def sharded(function, *shapes: tuple[int, ...]) -> str:
    """Text of `function` run on every device of the 2 x 4 mesh on arrays of `shapes` each."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    run = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return text_of(run, *shapes)


def ring(x: jax.Array, axis: str) -> jax.Array:
    n = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


# Operation, its kind, the whole buffer as a multiple of the operand, bytes sent over the buffer.
KINDS = {
    "psum": (lax.psum, "all-reduce", lambda n: 1, lambda n: 2 * (n - 1) / n),
    "psum_scatter": (
        partial(lax.psum_scatter, tiled=True),
        "reduce-scatter",
        lambda n: 1,
        lambda n: (n - 1) / n,
    ),
    "all_gather": (lax.all_gather, "all-gather", lambda n: n, lambda n: (n - 1) / n),
    "all_to_all": (
        partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
        "all-to-all",
        lambda n: 1,
        lambda n: (n - 1) / n,
    ),
    "ppermute": (ring, "collective-permute", lambda n: 1, lambda n: 1.0),
}


# A ring is written for one mesh axis.
CASES = [(name, axes) for name in KINDS for axes in GROUPS if (name, axes) != ("ppermute", "ab")]


@pytest.mark.parametrize(("name", "axes"), CASES)
def test_a_collective_is_read_as_written(name: str, axes: str) -> None:
    operation, kind, whole, sent = KINDS[name]
    axis = axes if len(axes) == 1 else tuple(axes)
    [found] = collectives(sharded(lambda x: operation(x, axis), (8, 6)))
    n = len(next(iter(GROUPS[axes])))
    assert (found.kind, found.dtype, found.count) == (kind, "f32", 1)
    assert found.buffer_bytes == 8 * 6 * 4 * whole(n)
    assert found.wire_bytes == pytest.approx(found.buffer_bytes * sent(n))
    assert {tuple(sorted(group)) for group in found.groups} == GROUPS[axes]
    assert found.group_size == n
    assert not found.in_branch and not found.is_async
    assert name.replace("psum_", "reduce_") in found.op_name


def test_a_variadic_collective_has_all_its_bytes() -> None:
    found = collectives(sharded(lambda x, y: lax.psum((x, y, x.sum()), "b"), (8, 6), (3,)))
    assert sum(each.buffer_bytes for each in found) == 4 * (48 + 3 + 1)
    assert {each.kind for each in found} == {"all-reduce"}


def test_loops_multiply_collectives_and_branches_are_marked() -> None:
    def step(x: jax.Array) -> jax.Array:
        def inner(x, _):
            return ring(x * 2, "a"), None

        def outer(x, _):
            x = lax.psum(jnp.sin(x), "b")
            return lax.scan(inner, x, length=3)[0], None

        x = lax.scan(outer, x, length=5)[0]
        return lax.cond(x.sum() > 0, lambda x: lax.psum(x, "a"), lambda x: x, x)

    found = {(each.kind, each.in_branch): each.count for each in collectives(sharded(step, (4,)))}
    assert found == {
        ("all-reduce", False): 5,
        ("collective-permute", False): 15,
        ("all-reduce", True): 1,
    }


DOTS = [
    ("mk,kn->mn", (5, 6), (6, 7), 2 * 5 * 6 * 7),
    ("bmk,bkn->bmn", (3, 5, 6), (3, 6, 7), 2 * 3 * 5 * 6 * 7),
    ("bshd,hde->bse", (2, 5, 3, 4), (3, 4, 7), 2 * 2 * 5 * 3 * 4 * 7),
    ("bqhd,bkhd->bhqk", (2, 5, 3, 4), (2, 6, 3, 4), 2 * 2 * 5 * 6 * 3 * 4),
]


@pytest.mark.parametrize(("spec", "lhs", "rhs", "flops"), DOTS)
def test_dots_alone_and_fused(spec: str, lhs: tuple, rhs: tuple, flops: int) -> None:
    assert dot_flops(text_of(partial(jnp.einsum, spec), lhs, rhs)) == flops

    def fused(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.einsum(spec, x * 2, jnp.exp(y))) + 1

    assert dot_flops(text_of(fused, lhs, rhs)) == flops


def nested(x: jax.Array, w: jax.Array) -> jax.Array:
    """3 outer steps of one 8x8 matmul and 4 inner steps of another."""

    def inner(x, w):
        return jnp.tanh(x @ w), None

    def outer(x, _):
        return lax.scan(inner, jnp.tanh(x @ w[0]), w)[0], None

    return lax.scan(outer, x, length=3)[0]


@pytest.mark.parametrize("noted", [True, False], ids=["noted", "worked out"])
@pytest.mark.parametrize("differentiate", [False, True])
def test_loops_multiply_dots(noted: bool, differentiate: bool) -> None:
    function = jax.grad(lambda *args: nested(*args).sum(), (0, 1)) if differentiate else nested
    text = text_of(function, (8, 8), (4, 8, 8))
    assert "known_trip_count" in text
    if not noted:  # as on TPU: the count must come from the loop's counter
        text = re.sub(r"known_trip_count", "removed", text)
    assert dot_flops(text) == 3 * (1 + 4) * 2 * 8**3 * (3 if differentiate else 1)


@pytest.mark.parametrize(("start", "bound", "step"), [(0, 7, 1), (2, 9, 3), (10, 0, -4)])
def test_counters_of_any_start_and_step(start: int, bound: int, step: int) -> None:
    def body(state):
        i, x = state
        return i + step, jnp.tanh(x @ x)

    def loop(x: jax.Array) -> jax.Array:
        def more(state):
            return state[0] < bound if step > 0 else state[0] > bound

        return lax.while_loop(more, body, (start, x))[1]

    text = re.sub("known_trip_count", "removed", text_of(loop, (4, 4)))
    assert dot_flops(text) == 2 * 4**3 * len(range(start, bound, step))


def test_a_loop_over_data_is_refused_only_if_it_matters() -> None:
    def until(body):
        return lambda x: lax.while_loop(lambda x: x.sum() < 10, body, x) @ x

    with pytest.raises(ValueError, match="no trip count"):
        dot_flops(text_of(until(lambda x: x @ x), (4, 4)))
    assert dot_flops(text_of(until(lambda x: x + 1), (4, 4))) == 2 * 4**3


def test_the_dearest_branch_is_counted() -> None:
    def step(x: jax.Array) -> jax.Array:
        return lax.cond(x.sum() > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    assert dot_flops(text_of(step, (4, 4))) == 2 * 2 * 4**3


CONVOLUTIONS = [
    ((1, 1), "SAME", (1, 1), (1, 1), 1, 1),
    ((2, 1), "VALID", (1, 1), (1, 1), 1, 1),
    ((1, 1), [(1, 2), (0, 3)], (2, 3), (1, 2), 2, 1),
    ((1, 2), "SAME", (1, 1), (2, 1), 4, 1),
    ((1, 1), "SAME", (1, 1), (1, 1), 1, 2),
]


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions_agree_with_xla(case: tuple) -> None:
    stride, pad, hole, spread, groups, batch_groups = case
    convolve = partial(
        lax.conv_general_dilated,
        window_strides=stride,
        padding=pad,
        lhs_dilation=hole,
        rhs_dilation=spread,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        batch_group_count=batch_groups,
    )
    compiled = jax.jit(convolve).lower(*arrays((4, 9, 7, 8), (3, 2, 8 // groups, 12))).compile()
    assert dot_flops(compiled.as_text()) == compiled.cost_analysis()["flops"]


LAYERS, BATCH, SEQ, EMBED, HEADS, DIM, MLP, VOCAB = 3, 2, 16, 8, 2, 4, 24, 32


def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    def layer(x, w):
        q, k, v = (jnp.einsum("bse,ehd->bhsd", x, w[name]) for name in "qkv")
        scores = jnp.einsum("bhqd,bhkd->bhqk", q, k)
        scores = jnp.where(jnp.tril(jnp.ones((SEQ, SEQ), bool))[None, None], scores, -1e9)
        mixed = jnp.einsum("bhqk,bhkd->bqhd", jax.nn.softmax(scores), v)
        x = x + jnp.einsum("bqhd,hde->bqe", mixed, w["o"])
        return x + jax.nn.silu(x @ w["up"]) @ w["down"], None

    layers = {name: w for name, w in weights.items() if name != "head"}
    x, _ = lax.scan(layer, x, layers)
    return jax.nn.logsumexp(x @ weights["head"], axis=-1).sum()


@pytest.mark.parametrize("train", [False, True])
def test_the_flop_counter_equals_the_program(train: bool) -> None:
    shapes = {name: (LAYERS, EMBED, HEADS, DIM) for name in "qkv"}
    shapes |= {"o": (LAYERS, HEADS, DIM, EMBED), "up": (LAYERS, EMBED, MLP)}
    shapes |= {"down": (LAYERS, MLP, EMBED), "head": (EMBED, VOCAB)}
    weights = {name: arrays(shape)[0] for name, shape in shapes.items()}
    function = jax.value_and_grad(loss, (0, 1)) if train else loss
    program = jax.jit(function).lower(weights, *arrays((BATCH, SEQ, EMBED))).compile()
    width = HEADS * DIM
    matmuls = [
        Matmul("qkv", EMBED, 3 * width, LAYERS),
        Matmul("o", width, EMBED, LAYERS),
        Matmul("mlp", EMBED, 2 * MLP, LAYERS),
        Matmul("head", EMBED, VOCAB),
    ]
    attention = [AttentionFlops(HEADS, DIM, count=LAYERS)]
    counted = forward_flops(matmuls, attention, seq=SEQ, sequences=BATCH)
    # The plain kernel computes masked scores too.
    expected = counted.train_full if train else counted.matmul + counted.attention_full
    assert dot_flops(program.as_text()) == expected


def test_kernels_that_cannot_be_seen_are_named() -> None:
    def host(x: jax.Array) -> jax.Array:
        def body(x, _):
            return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x), None

        return lax.scan(body, x, length=3)[0]

    assert list(opaque_kernels(text_of(host, (4,))).values()) == [3]
    assert opaque_kernels(text_of(lambda x: jnp.sin(x @ x), (4, 4))) == {}


def test_peak_memory() -> None:
    def layers(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].sum()

    compiled = jax.jit(jax.grad(layers)).lower(*arrays((32, 32), (8, 32, 32))).compile()
    found = peak_memory(compiled)
    assert found["argument_bytes"] == 9 * 32 * 32 * 4
    assert found["output_bytes"] == 32 * 32 * 4
    assert found["temp_bytes"] >= 8 * 32 * 32 * 4, "the outputs of 8 layers wait for the backward"
    assert found["peak_bytes"] == 10 * 32 * 32 * 4 + found["temp_bytes"]
    nothing = peak_memory(SimpleNamespace(memory_analysis=lambda: None))
    assert set(nothing) == set(found) and set(nothing.values()) == {None}


TPU_REDUCE_SCATTER = """HloModule step, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[8,16]) -> f32[2,16] {
  %input = f32[8,16]{1,0} parameter(0)
  %all-reduce.1 = f32[8,16]{1,0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, to_apply=%add
  %here = u32[] constant(0)
  ROOT %mine = f32[2,16]{1,0} dynamic-slice(%all-reduce.1, %here, %here), dynamic_slice_sizes={2,16}
}

ENTRY %main (x: f32[8,16]) -> f32[2,16] {
  %x = f32[8,16]{1,0} parameter(0)
  ROOT %fusion = f32[2,16]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
}
"""


def test_a_fused_reduce_scatter_of_a_tpu_is_one() -> None:
    """It is written as an all-reduce of which a slice is kept, in a fusion that sends no more."""
    (found,) = collectives(TPU_REDUCE_SCATTER)
    assert (found.kind, found.buffer_bytes, found.group_size) == ("reduce-scatter", 512, 4)
    assert found.total_wire_bytes == 512 * 3 / 4
    (apart,) = collectives(TPU_REDUCE_SCATTER.replace("%all-reduce-scatter", "%another"))
    assert apart.kind == "all-reduce"


def test_sums_of_a_tpu_travel_in_the_type_of_their_result() -> None:
    mixed = re.sub(r"(input|x): f32", r"\1: bf16", TPU_REDUCE_SCATTER)
    mixed = re.sub(r"(%input|%x) = f32", r"\1 = bf16", mixed)
    (found,) = collectives(mixed)
    assert (found.dtype, found.buffer_bytes) == ("f32", 512)
