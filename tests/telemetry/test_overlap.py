"""What hides behind what: on programs written here line by line, in the forms that each compiler
prints, and on programs that a TPU's compiler has really scheduled."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.matmul import Tiled, gather_matmul
from jaxtrain.collectives.ring import Ring
from jaxtrain.program.collectives import collectives, dot_flops
from jaxtrain.program.overlap import MatmulWork, Tally, overlaps, tally
from tests.absent_tpu import for_tpu, no_cache, tpu

HEAD = "HloModule m, is_scheduled=true, num_partitions=4\n\n"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
FLOPS = 2 * 8**3
RING = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
SYNC = ', backend_config={"collective_backend_config":{"is_sync":true}}'
GATHER = "channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, use_global_device_ids=true"


def scheduled(*lines: str, other: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""{HEAD}{other}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
{body}
  ROOT %out = f32[8,8]{{1,0}} copy(%x)
}}
"""


def dot(name: str) -> str:
    return f"%{name} = f32[8,8]{{1,0}} dot(%x, %x), {DOT}"


def start(name: str, more: str = "") -> str:
    return f"%{name} = (f32[8,8], f32[8,8]) collective-permute-start(%x), {RING}{more}"


def done(name: str) -> str:
    return f"%{name}.done = f32[8,8]{{1,0}} collective-permute-done(%{name})"


FUSED = f"""%fused (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %d = f32[8,8]{{1,0}} dot(%p, %p), {DOT}
  ROOT %e = f32[8,8]{{1,0}} add(%d, %p)
}}
"""
LOOP = f"""%body (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %s = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %y = f32[8,8]{{1,0}} get-tuple-element(%s), index=1
  %p = (f32[8,8], f32[8,8]) collective-permute-start(%y), {RING}
  %d = f32[8,8]{{1,0}} dot(%y, %y), {DOT}
  %p.done = f32[8,8]{{1,0}} collective-permute-done(%p)
  %d.2 = f32[8,8]{{1,0}} dot(%d, %p.done), {DOT}
  ROOT %t = (s32[], f32[8,8]) tuple(%i, %d.2)
}}

%condition (c: (s32[], f32[8,8])) -> pred[] {{
  %c = (s32[], f32[8,8]{{1,0}}) parameter(0)
  ROOT %k = pred[] constant(true)
}}
"""
WHILE = (
    "%t = (s32[], f32[8,8]) tuple(%x, %x)",
    "%w = (s32[], f32[8,8]) while(%t), condition=%condition, body=%body, "
    'backend_config={"known_trip_count":{"n":"5"}}',
)
GEMM = '%g = (f32[8,8]{1,0}, s8[4]{0}) custom-call(%x, %x), custom_call_target="__cublas$gemm"'
WRAPPED = f"""%wrapped (q: f32[8,8]) -> f32[32,8] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  ROOT %a = f32[32,8]{{1,0}} all-gather(%q), {GATHER}
}}
"""

# Lines of the entry, other computations -> (asynchronous, matmuls between) of each by name.
PROGRAMS = {
    "nothing between": ([start("a"), done("a"), dot("d")], "", {"a": (True, 0)}),
    "one matmul": ([start("a"), dot("d"), done("a")], "", {"a": (True, 1)}),
    "declared synchronous": ([start("a", SYNC), dot("d"), done("a")], "", {"a": (False, 0)}),
    "two share a matmul": (
        [start("a"), start("b"), dot("d"), done("a"), dot("e"), done("b")],
        "",
        {"a": (True, 1), "b": (True, 2)},
    ),
    "no start": ([f"%a = f32[32,8]{{1,0}} all-gather(%x), {GATHER}"], "", {"a": (False, 0)}),
    "a fusion and a gemm": (
        [start("a"), "%f = f32[8,8] fusion(%x), kind=kOutput, calls=%fused", GEMM, done("a")],
        FUSED,
        {"a": (True, 2)},
    ),
    "a loop between": ([start("a"), *WHILE, done("a")], LOOP, {"a": (True, 10), "p": (True, 1)}),
    "wrapped by the compiler": (
        [
            "%s = ((f32[8,8]), f32[32,8], u32[]) async-start(%x), calls=%wrapped",
            dot("d"),
            "%s.done = f32[32,8] async-done(%s), calls=%wrapped",
        ],
        WRAPPED,
        {"a": (True, 1)},
    ),
    "awaited elsewhere": ([dot("d"), start("a"), dot("e")], "", {"a": (True, 1)}),
}


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_stands_between_start_and_done(case: str) -> None:
    lines, other, expected = PROGRAMS[case]
    found = {each.parts[0].name: each for each in overlaps(scheduled(*lines, other=other))}
    assert {n: (each.asynchronous, each.work.matmuls) for n, each in found.items()} == expected
    for each in found.values():
        assert each.work.flops == each.work.matmuls * FLOPS
        assert each.hidden == (each.work.matmuls > 0)


def test_a_collective_of_a_loop_runs_as_often_as_the_loop() -> None:
    found = {each.parts[0].name: each for each in overlaps(scheduled(*WHILE, other=LOOP))}
    assert found["p"].count == 5 and found["p"].wire_bytes == 5 * 8 * 8 * 4
    assert found["p"].work == MatmulWork(1, FLOPS), "of one of its runs"


def test_of_branches_the_least_is_counted() -> None:
    """A choice hides what its poorer branch hides."""
    empty = FUSED.replace("%fused", "%empty").replace(f"dot(%p, %p), {DOT}", "add(%p, %p)")
    chosen = "%c = f32[8,8] conditional(%x, %x, %x), branch_computations={%fused, %empty}"
    [one] = overlaps(scheduled(start("a"), chosen, done("a"), other=FUSED + "\n" + empty))
    assert one.asynchronous and not one.hidden


CHAIN = f"""%begin (p: f32[8,8]) -> (f32[8,8], f32[32,8]) {{
  %p = f32[8,8]{{1,0}} parameter(0)
  %ag = f32[32,8]{{1,0}} all-gather(%p), {GATHER}, frontend_attributes={{chain_id="7"}}
  ROOT %s = (f32[8,8], f32[32,8]) custom-call(%ag), custom_call_target="AsyncCollectiveStart"
}}

%through (q: f32[8,8]) -> f32[8,8] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  %ag.1 = f32[32,8]{{1,0}} all-gather(%q), {GATHER}, frontend_attributes={{chain_id="7"}}
  ROOT %d.1 = f32[8,8]{{1,0}} dot(%q, %q), {DOT}
}}

%end (r: f32[8,8]) -> f32[32,8] {{
  %r = f32[8,8]{{1,0}} parameter(0)
  %ag.2 = f32[32,8]{{1,0}} all-gather(%r), {GATHER}, frontend_attributes={{chain_id="7"}}
  ROOT %w = f32[32,8] custom-call(%r, %r, %ag.2), custom_call_target="AsyncCollectiveDone"
}}
"""


def test_a_tpu_chain_of_fusions_is_one_collective() -> None:
    fusions = [f"%f.{i} = f32[8,8] fusion(%x), kind=kCustom, calls=%{name}"
               for i, name in enumerate(("begin", "through", "through", "end"))]  # fmt: skip
    [gather] = overlaps(scheduled(dot("before"), *fusions, dot("after"), other=CHAIN))
    assert (gather.kind, gather.count, gather.asynchronous) == ("all-gather", 1, True)
    assert gather.work == MatmulWork(2, 2 * FLOPS)


def test_tallies_add_up() -> None:
    sync = f"%g = f32[32,8]{{1,0}} all-gather(%x), {GATHER}"
    text = scheduled(start("a"), dot("d"), done("a"), start("b"), done("b"), sync)
    sent = 8 * 8 * 4
    assert tally(overlaps(text)) == {
        "collective-permute": Tally(2, 2, 1, 2 * sent, 2 * sent, sent),
        "all-gather": Tally(1, 0, 0, 3 * sent, 0, 0),
    }
    assert tally(overlaps(text), lambda each: "all")["all"] == Tally(
        3, 2, 1, 5 * sent, 2 * sent, sent
    )


@pytest.mark.parametrize("pace", [0.0, 0.1, 0.25, 1.0, math.inf])
def test_hidden_is_what_the_link_sends_in_the_time_of_the_matmuls(pace: float) -> None:
    """Of two permutes of 256 bytes: behind one matmul, and behind none."""
    text = scheduled(start("a"), dot("d"), done("a"), start("b"), done("b"))
    [found] = tally(overlaps(text), bytes_per_flop=lambda each: pace).values()
    assert found.hidden_bytes == min(256, FLOPS * pace)
    assert found.exposed_bytes == 512 - found.hidden_bytes
    five_turns = overlaps(scheduled(*WHILE, other=LOOP))
    [found] = tally(five_turns, bytes_per_flop=lambda each: pace).values()
    assert found.hidden_bytes == 5 * min(256, FLOPS * pace)


SHARED = {
    # Lines -> matmuls of time that each of two permutes of four matmuls' time has for itself.
    "one behind the other": ([start("a"), dot("d"), done("a"), start("b"), dot("e"), done("b")], 1),
    "both behind both": (
        [start("a"), start("b"), dot("d"), dot("e"), done("a"), done("b")],
        1,
    ),
    "both behind one": ([start("a"), start("b"), dot("d"), done("a"), done("b"), dot("e")], 0.5),
    "one within the other": (
        [start("a"), dot("d"), start("b"), dot("e"), done("b"), dot("f"), done("a")],
        1.5,
    ),
}


@pytest.mark.parametrize("case", SHARED)
def test_a_matmul_hides_one_collective_at_a_time(case: str) -> None:
    """However many are on their way: together no more bytes than links send in its time."""
    lines, matmuls = SHARED[case]
    pace = 256 / (4 * FLOPS)
    [found] = tally(overlaps(scheduled(*lines)), bytes_per_flop=lambda each: pace).values()
    assert found.hidden == 2
    assert found.hidden_bytes == 2 * matmuls * FLOPS * pace


def test_what_is_awaited_first_is_hidden_first() -> None:
    """So that both of these are, each of which takes the time of one matmul."""
    lines = [start("a"), start("b"), dot("d"), done("b"), dot("e"), done("a")]
    [found] = tally(overlaps(scheduled(*lines)), bytes_per_flop=lambda each: 256 / FLOPS).values()
    assert found.exposed_bytes == 0


OUTER = f"""%outer (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %s = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %z = f32[8,8]{{1,0}} get-tuple-element(%s), index=1
  %b = (f32[8,8], f32[8,8]) collective-permute-start(%z), {RING}
  %u = (s32[], f32[8,8]) while(%s), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"5"}}}}
  %b.done = f32[8,8]{{1,0}} collective-permute-done(%b)
  ROOT %v = (s32[], f32[8,8]) tuple(%i, %b.done)
}}
"""
CALLED = f"""%aside (q: f32[8,8]) -> f32[8,8] {{
  %q = f32[8,8]{{1,0}} parameter(0)
  %p = (f32[8,8], f32[8,8]) collective-permute-start(%q), {RING}
  %d = f32[8,8]{{1,0}} dot(%q, %q), {DOT}
  %p.done = f32[8,8]{{1,0}} collective-permute-done(%p)
  ROOT %d.2 = f32[8,8]{{1,0}} dot(%d, %p.done), {DOT}
}}
"""
NESTED = {
    # Lines between a's start and done, other computations -> eighths of 256 bytes that are hidden
    # in all runs of each permute. A link sends an eighth of them in the time of one product.
    # Each turn of the loop has two products, one of them beside its own permute.
    "a loop": (WHILE, LOOP, {"p": 5, "a": 5}),
    "a loop twice": ((*WHILE, WHILE[1].replace("%w", "%w.2")), LOOP, {"p": 10, "a": 8}),
    "a loop, and a product": ((*WHILE, dot("d")), LOOP, {"p": 5, "a": 6}),
    "a loop in a loop": (
        (WHILE[0], WHILE[1].replace("%body", "%outer").replace('"5"', '"3"')),
        LOOP + OUTER,
        {"p": 15, "b": 15, "a": 0},
    ),
    "a call": (("%c = f32[8,8] call(%x), to_apply=%aside",), CALLED, {"p": 1, "a": 1}),
}


@pytest.mark.parametrize("case", NESTED)
def test_a_loop_hides_with_what_its_own_collectives_leave(case: str) -> None:
    lines, other, eighths = NESTED[case]
    windows = overlaps(scheduled(start("a"), *lines, done("a"), other=other))
    pace = 256 / (8 * FLOPS)
    each = tally(windows, lambda window: window.parts[0].name, lambda window: pace)
    assert {name: found.hidden_bytes / 32 for name, found in each.items()} == eighths


def test_a_kernel_hides_what_its_flops_say() -> None:
    kernel = '%k = f32[8,8]{1,0} custom-call(%x), custom_call_target="tpu_custom_call"'
    text = scheduled(start("a"), kernel, done("a"))
    [unknown], [known] = overlaps(text), overlaps(text, kernel_flops=3 * FLOPS)
    assert not unknown.hidden and known.work == MatmulWork(1, 3 * FLOPS)
    free = kernel.replace("tpu_custom_call", "AllocateBuffer")
    [other] = overlaps(scheduled(start("a"), free, done("a")), kernel_flops=3 * FLOPS)
    assert not other.hidden


def test_a_program_without_a_schedule_is_refused() -> None:
    text = scheduled(start("a"), done("a")).replace(", is_scheduled=true", "")
    with pytest.raises(ValueError, match=r"no schedule.*compiled\.as_text"):
        overlaps(text)


def test_every_collective_of_a_program_is_told_once() -> None:
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))

    def turn(x, _):
        return lax.psum(jnp.sin(x @ x), "a") / 8, None

    run = jax.shard_map(
        lambda x: lax.scan(turn, x, length=3)[0], mesh=mesh, in_specs=P(), out_specs=P()
    )
    text = jax.jit(run).lower(jax.ShapeDtypeStruct((4, 4), jnp.float32)).compile().as_text()
    [one] = overlaps(text)
    assert (one.kind, one.count, one.asynchronous) == ("all-reduce", 3, False)
    assert one.parts == tuple(collectives(text))


# Programs of a TPU's compiler

T, F = "tensor", "fsdp"
X, W = ((2048, 1024), P(T)), ((1024, 4096), P(None, T))
V5E, V5P = ("meshes/v5e_16.toml", "2x2"), ("meshes/v5p_512.toml", "2x2x1")


@tpu
@no_cache
@pytest.mark.parametrize("ring", [Ring(1), Ring(2), Ring(1, unroll=False)], ids=str)
def test_every_hop_of_a_collective_matmul_hides_behind_a_product(monkeypatch, ring: Ring) -> None:
    def product(x, w):
        return gather_matmul(x, (w,), (T,), ring)[0]

    text = for_tpu(monkeypatch, *V5E, T, product, X, W, out=P(None, T))
    found = tally(overlaps(text))
    assert set(found) == {"collective-permute"}
    hops = found["collective-permute"]
    assert hops.count == hops.asynchronous == hops.hidden == 3
    assert hops.wire_bytes == 3 * 512 * 1024 * 2
    assert dot_flops(text) == 2 * 2048 * 1024 * 1024


@tpu
@no_cache
def test_every_hop_of_weight_gradients_hides_behind_products(monkeypatch) -> None:
    """Of two matrices at once, one cut along each dim, in fp32."""

    def gradients(x, dy):
        tiles = [Tiled(None, None, dim, (F,), Ring(1), jnp.dtype(jnp.float32)) for dim in (0, 1)]
        return tuple(each.gradient(x, dy).tile for each in tiles)

    x, dy = ((4096, 1024), P(F)), ((4096, 2048), P(F))
    text = for_tpu(monkeypatch, *V5P, F, gradients, x, dy, out=(P(F), P(None, F)))
    found = tally(overlaps(text))
    assert set(found) == {"collective-permute"}
    hops = found["collective-permute"]
    assert hops.count == hops.asynchronous == hops.hidden == 6
    assert hops.wire_bytes == 6 * 1024 * 2048 * 4 / 4
    assert dot_flops(text) == 2 * 2 * 1024 * 1024 * 2048


@tpu
@no_cache
def test_the_plain_form_waits_for_its_gather(monkeypatch) -> None:
    def plain(x, w):
        return lax.all_gather(x, T, axis=0, tiled=True) @ w

    found = tally(overlaps(for_tpu(monkeypatch, *V5E, T, plain, X, W, out=P(None, T))))
    assert found["all-gather"].count == 1 and found["all-gather"].hidden == 0
