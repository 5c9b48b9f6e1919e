"""The roofline of programs whose kernels, FLOPs and bytes are known by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxtrain.program.roofline import Roofline, roofline
from jaxtrain.program.totals import FALLBACK

LAYERS = """HloModule layers, is_scheduled=true

window (stack: f32[10,64,64], at: s32[]) -> f32[64,64] {
  stack = f32[10,64,64]{2,1,0} parameter(0)
  at = s32[] parameter(1)
  zero = s32[] constant(0)
  one = f32[1,64,64]{2,1,0} dynamic-slice(stack, at, zero, zero), dynamic_slice_sizes={1,64,64}
  ROOT flat = f32[64,64]{1,0} bitcast(one)
}

keep (out: f32[10,64,64], x: f32[64,64], at: s32[]) -> f32[10,64,64] {
  out = f32[10,64,64]{2,1,0} parameter(0)
  x = f32[64,64]{1,0} parameter(1)
  at = s32[] parameter(2)
  zero = s32[] constant(0)
  wide = f32[1,64,64]{2,1,0} bitcast(x)
  ROOT done = f32[10,64,64]{2,1,0} dynamic-update-slice(out, wide, at, zero, zero)
}

product (x: f32[64,64], w: f32[64,64]) -> f32[64,64] {
  x = f32[64,64]{1,0} parameter(0)
  w = f32[64,64]{1,0} parameter(1)
  made = f32[64,64]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT out = f32[64,64]{1,0} tanh(made)
}

body (state: (s32[], f32[64,64], f32[10,64,64], f32[10,64,64])) -> (s32[], f32[64,64], f32[10,64,64], f32[10,64,64]) {
  state = (s32[], f32[64,64]{1,0}, f32[10,64,64]{2,1,0}, f32[10,64,64]{2,1,0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  x = f32[64,64]{1,0} get-tuple-element(state), index=1
  ws = f32[10,64,64]{2,1,0} get-tuple-element(state), index=2
  outs = f32[10,64,64]{2,1,0} get-tuple-element(state), index=3
  w = f32[64,64]{1,0} fusion(ws, i), kind=kLoop, calls=window
  y = f32[64,64]{1,0} fusion(x, w), kind=kOutput, calls=product
  kept = f32[10,64,64]{2,1,0} fusion(outs, y, i), kind=kLoop, calls=keep
  one = s32[] constant(1)
  next = s32[] add(i, one)
  ROOT turned = (s32[], f32[64,64]{1,0}, f32[10,64,64]{2,1,0}, f32[10,64,64]{2,1,0}) tuple(next, y, ws, kept)
}

condition (state: (s32[], f32[64,64], f32[10,64,64], f32[10,64,64])) -> pred[] {
  state = (s32[], f32[64,64]{1,0}, f32[10,64,64]{2,1,0}, f32[10,64,64]{2,1,0}) parameter(0)
  i = s32[] get-tuple-element(state), index=0
  ten = s32[] constant(10)
  ROOT less = pred[] compare(i, ten), direction=LT
}

ENTRY main (x: f32[64,64], ws: f32[10,64,64], outs: f32[10,64,64]) -> f32[64,64] {
  x = f32[64,64]{1,0} parameter(0)
  ws = f32[10,64,64]{2,1,0} parameter(1)
  outs = f32[10,64,64]{2,1,0} parameter(2)
  zero = s32[] constant(0)
  start = (s32[], f32[64,64]{1,0}, f32[10,64,64]{2,1,0}, f32[10,64,64]{2,1,0}) tuple(zero, x, ws, outs)
  ended = (s32[], f32[64,64]{1,0}, f32[10,64,64]{2,1,0}, f32[10,64,64]{2,1,0}) while(start), condition=condition, body=body, backend_config={"known_trip_count":{"n":"10"}}
  ROOT y = f32[64,64]{1,0} get-tuple-element(ended), index=1
}
"""  # noqa: E501
TILE = 64 * 64 * 4
INDEX = 4


def test_a_loop_over_layers_reads_a_window_of_the_stack_and_writes_one():
    """Four kernels a turn, and the comparison. By memory alone: a slice read and written, x and w
    read and y written, y read and its window written, i and the counter."""
    found = roofline(LAYERS, peak_flops=1e30, bandwidth_gbytes=1.0)
    turn = (2 * TILE + INDEX) + 3 * TILE + (2 * TILE + INDEX) + 3 * INDEX
    condition = 2 * INDEX + 1
    assert found.kernels == 10 * 5
    assert found.seconds == pytest.approx(10 * (turn + condition) / 1e9)
    assert found.memory_bound_s == pytest.approx(found.seconds)


def test_a_product_that_takes_longer_than_its_bytes_is_bound_by_the_peak():
    slow = roofline(LAYERS, peak_flops=1e3, bandwidth_gbytes=1e12)
    assert slow.seconds == pytest.approx(10 * 2 * 64**3 / 1e3)
    assert slow.memory_bound_s < 1e-6 * slow.seconds


def text_of(function, *shapes):
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.jit(function).lower(*given).compile().as_text()


def test_a_branch_for_what_hardly_occurs_does_not_count():
    def product(x):
        return x @ x

    def many(x):
        with jax.named_scope(FALLBACK):
            return x @ x @ x @ x

    def either(x):
        return lax.cond(jnp.sum(x) > 0, product, many, x)

    with_branch = roofline(text_of(either, (64, 64)), peak_flops=1.0, bandwidth_gbytes=1e12)
    alone = roofline(text_of(product, (64, 64)), peak_flops=1.0, bandwidth_gbytes=1e12)
    assert with_branch.seconds == pytest.approx(alone.seconds) == pytest.approx(2 * 64**3)


SPREAD = """HloModule spread, is_scheduled=true

window (x: f32[64,64], at: s32[]) -> f32[8,64] {
  x = f32[64,64]{1,0} parameter(0)
  at = s32[] parameter(1)
  zero = s32[] constant(0)
  ROOT part = f32[8,64]{1,0} dynamic-slice(x, at, zero), dynamic_slice_sizes={8,64}
}

spread (mine: f32[1,4096], whole: f32[4,4096], mark: u32[], x: f32[64,64], w: f32[64,64], at: s32[]) -> (f32[8,64], f32[1,4096], f32[4,4096], f32[4,4096], u32[]) {
  x = f32[64,64]{1,0} parameter(3)
  at = s32[] parameter(5)
  part = f32[8,64]{1,0} fusion(x, at), kind=kLoop, calls=window
  w = f32[64,64]{1,0} parameter(4)
  y = f32[8,64]{1,0} convolution(part, w), dim_labels=bf_io->bf
  mine = f32[1,4096]{1,0} parameter(0)
  whole = f32[4,4096]{1,0} parameter(1)
  gathered = f32[4,4096]{1,0} all-gather(mine), replica_groups={{0,1,2,3}}, dimensions={0}
  mark = u32[] parameter(2)
  ROOT out = (f32[8,64]{1,0}, f32[1,4096]{1,0}, f32[4,4096]{1,0}, f32[4,4096]{1,0}, u32[]) tuple(y, mine, whole, gathered, mark)
}

ENTRY main (mine: f32[1,4096], whole: f32[4,4096], mark: u32[], x: f32[64,64], w: f32[64,64], at: s32[]) -> f32[8,64] {
  mine = f32[1,4096]{1,0} parameter(0)
  whole = f32[4,4096]{1,0} parameter(1)
  mark = u32[] parameter(2)
  x = f32[64,64]{1,0} parameter(3)
  w = f32[64,64]{1,0} parameter(4)
  at = s32[] parameter(5)
  beside = (f32[8,64]{1,0}, f32[1,4096]{1,0}, f32[4,4096]{1,0}, f32[4,4096]{1,0}, u32[]) fusion(mine, whole, mark, x, w, at), kind=kOutput, calls=spread
  ROOT y = f32[8,64]{1,0} get-tuple-element(beside), index=0
}
"""  # noqa: E501


def test_a_kernel_beside_which_a_gather_goes_on_has_the_bytes_of_its_own_work() -> None:
    """The gather's buffers pass through it; of x, cut in a fusion within, it reads a window."""
    found = roofline(SPREAD, peak_flops=1e30, bandwidth_gbytes=1.0)
    window = 8 * 64 * 4
    assert found.kernels == 1
    assert found.seconds == pytest.approx((TILE + window + INDEX + window) / 1e9)


def test_totals_add_and_multiply():
    one = Roofline(2, 3.0, 1.0, 5, 0.5)
    assert one + one == one * 2 == Roofline(4, 6.0, 2.0, 10, 1.0)
    assert not Roofline() and one


NARROW = """HloModule narrow, is_scheduled=true

fused (x: bf16[64,64], w: f8e4m3fn[64,64]) -> f32[64,64] {
  x = bf16[64,64]{1,0} parameter(0)
  w = f8e4m3fn[64,64]{1,0} parameter(1)
  small = f8e5m2[64,64]{1,0} convert(x)
  ROOT made = f32[64,64]{1,0} dot(small, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY main (x: bf16[64,64], w: f8e4m3fn[64,64], i: s8[64,64]) -> s32[64,64] {
  x = bf16[64,64]{1,0} parameter(0)
  w = f8e4m3fn[64,64]{1,0} parameter(1)
  i = s8[64,64]{1,0} parameter(2)
  wide = f32[64,64]{1,0} dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  mixed = f32[64,64]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  floats = f32[64,64]{1,0} fusion(x, w), kind=kOutput, calls=fused
  ROOT whole = s32[64,64]{1,0} dot(i, i), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_products_of_two_8_bit_operands_have_a_rate_of_their_own() -> None:
    """Of four products of one size two: one of floats in a fusion, one of whole numbers."""
    given = dict(peak_flops=1e6, bandwidth_gbytes=1e9)
    one = 2 * 64**3 / 1e6
    assert roofline(NARROW, **given).seconds == pytest.approx(4 * one)
    assert roofline(NARROW, **given, narrow_flops=4e6).seconds == pytest.approx(2.5 * one)


ON_CHIP = """HloModule on_chip, is_scheduled=true

store (at: s32[], tile: bf16[64,64]) -> bf16[512,64] {
  empty = bf16[512,64]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  tile = bf16[64,64]{1,0:S(1)} parameter(1)
  at = s32[]{:S(6)} parameter(0)
  zero = s32[] constant(0)
  ROOT kept = bf16[512,64]{1,0} dynamic-update-slice(empty, tile, at, zero)
}

cut (tall: bf16[512,64], at: s32[]) -> bf16[64,64] {
  tall = bf16[512,64]{1,0:S(1)} parameter(0)
  at = s32[]{:S(6)} parameter(1)
  zero = s32[] constant(0)
  ROOT part = bf16[64,64]{1,0} dynamic-slice(tall, at, zero), dynamic_slice_sizes={64,64}
}

ENTRY main (x: bf16[64,64], y: bf16[512,64], at: s32[]) -> bf16[512,64] {
  x = bf16[64,64]{1,0} parameter(0)
  y = bf16[512,64]{1,0} parameter(1)
  at = s32[]{:S(6)} parameter(2)
  near = bf16[64,64]{1,0:S(1)} copy(x), backend_config={"window_config":{"estimated_cycles":"40"}}
  begun = ((bf16[512,64]{1,0}), bf16[64,64]{1,0:S(1)}, s32[]{:S(2)}) slice-start(y), slice={[0:64], [0:64]}
  awaited = bf16[64,64]{1,0:S(1)} slice-done(begun)
  sum = bf16[64,64]{1,0:S(1)} add(near, awaited), backend_config={"window_config":{"estimated_cycles":"2"}}
  tall = bf16[512,64]{1,0} fusion(at, sum), kind=kLoop, calls=store
  close = bf16[512,64]{1,0:S(1)} copy(tall)
  zero = s32[] constant(0)
  piece = bf16[64,64]{1,0:S(1)} dynamic-slice(close, at, zero), dynamic_slice_sizes={64,64}
  put = bf16[512,64]{1,0:S(1)} dynamic-update-slice(close, x, at, zero)
  ROOT part = bf16[64,64]{1,0} fusion(close, at), kind=kLoop, calls=cut
}
"""  # noqa: E501


def test_bytes_are_those_of_the_devices_own_memory() -> None:
    """A tile is read to the chip, summed there for nothing with one that came meanwhile, written as
    a window of an empty buffer; that is read whole to the chip, cut there for nothing, updated by
    a tile that is read, and a window of it written."""
    tile = 64 * 64 * 2
    found = roofline(ON_CHIP, peak_flops=1e30, bandwidth_gbytes=1.0)
    assert found.kernels == 7
    assert found.seconds == pytest.approx((tile + 0 + tile + 8 * tile + 0 + tile + tile) / 1e9)
    assert found.cycles == 42 and found.cycles_s == pytest.approx(tile / 1e9)
    told = found.summary(0.5, 1.75)
    assert "7 kernels, 9.83e-05 s" in told and "at most 50% causal MFU" in told
    assert told.endswith("take 8.19e-06 s of it are 2.4e-08 s by the compiler's estimate")
    assert "estimate" not in found.summary(None, None)
