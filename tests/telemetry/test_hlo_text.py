"""Programs as XLA prints them for GPU and TPU (lines from v5e and H100 programs), and grammar."""

from __future__ import annotations

import pytest

from jaxtrain.program.collectives import collectives, dot_flops
from jaxtrain.program.groups import connected, replica_groups
from jaxtrain.program.text import Shape, parse

# The loop has no trip count of its own; an asynchronous all-gather passes through three fusions.
TPU = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(bf16[4,128]{1,0})->()}, \
num_partitions=8

FileNames
1 "model.py"

%begin (p.0: bf16[4,128]) -> (bf16[4,128], bf16[4,512], u32[]) {
  %p.0 = bf16[4,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.1 = bf16[4,512]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, use_global_device_ids=true, \
frontend_attributes={chain_id="0"}, metadata={op_name="jit(step)/while/body/all_gather" x=1}
  ROOT %custom-call.1 = (bf16[4,128]{1,0}, bf16[4,512]{1,0:T(8,128)(2,1)S(1)}, u32[]{:S(2)}) \
custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}

%meanwhile (p.1: bf16[4,128], p.2: bf16[4,4,512,64]) -> bf16[4,4,512,512] {
  %p.1 = bf16[4,128]{1,0} parameter(0)
  %p.2 = bf16[4,4,512,64]{3,2,1,0} parameter(1)
  %all-gather.2 = bf16[4,512]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=1, \
replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={1}, use_global_device_ids=true, \
frontend_attributes={chain_id="0"}
  ROOT %convolution-base-dilated.24 = bf16[4,4,512,512]{2,3,1,0:T(8,128)(2,1)S(1)} \
convolution(%p.2, /*index=1*/%p.2), window={size=4x4 stride=3x3 lhs_dilate=4x4}, \
dim_labels=01bf_01oi->01bf
}

%body (state: (s32[], bf16[4,128], /*index=2*/bf16[4,4,512,64])) -> (s32[], bf16[4,128], bf16[4]) {
  %state = (s32[]{:T(128)}, bf16[4,128]{1,0:T(8,128)(2,1)S(1)}, /*index=2*/bf16[4,4,512,64]{3,2,1,\
0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %x = bf16[4,128]{1,0} get-tuple-element(%state), index=1
  %q = bf16[4,4,512,64]{3,2,1,0} get-tuple-element(%state), index=2
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %fusion.1 = (bf16[4,128]{1,0}, bf16[4,512]{1,0}, u32[]) fusion(%x), kind=kCustom, calls=%begin
  %fusion.2 = bf16[4,4,512,512]{3,2,1,0} fusion(%x, %q), kind=kOutput, calls=%meanwhile
  ROOT %out = (s32[], bf16[4,128], bf16[4,4,512,64]) tuple(%next, %x, %q)
}

%condition (state: (s32[], bf16[4,128], bf16[4,4,512,64])) -> pred[] {
  %limit = s32[]{:T(128)} constant(3)
  %state.1 = (s32[]{:T(128)}, bf16[4,128]{1,0}, bf16[4,4,512,64]{3,2,1,0}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %limit), direction=LT
}

ENTRY %main (p.8: bf16[4,128], p.9: bf16[4,4,512,64]) -> (s32[], bf16[4,128], bf16[4,4,512,64]) {
  %p.8 = bf16[4,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="x[\\'a, {\\"]"}
  %p.9 = bf16[4,4,512,64]{3,2,1,0} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %start = (s32[], bf16[4,128], bf16[4,4,512,64]) tuple(%zero, %p.8, %p.9)
  ROOT %loop = (s32[], bf16[4,128], bf16[4,4,512,64]) while(%start), \
condition=%condition, body=%body
}
"""

GPU = """HloModule jit_step, is_scheduled=true, num_partitions=8, frontend_attributes={fp="0"}

%wrapped (w.0: f32[8,16]) -> f32[2,16] {
  %w.0 = f32[8,16]{1,0} parameter(0)
  ROOT %rs = f32[2,16]{1,0} reduce-scatter(%w.0), channel_id=9, replica_groups=[2,4]<=[8], \
use_global_device_ids=true, dimensions={0}, to_apply=%sum
}

ENTRY %main (a: bf16[128,4], b: bf16[8,256,512], c: bf16[256,8,256], d: f32[8,16]) -> f32[2,16] {
  %a = bf16[128,4]{1,0} parameter(0)
  %b = bf16[8,256,512]{2,1,0} parameter(1)
  %c = bf16[256,8,256]{2,1,0} parameter(2)
  %d = f32[8,16]{1,0} parameter(3)
  %all-gather-start.4 = ((bf16[128,4]{1,0}, f32[8,16]{1,0}), (bf16[256,4]{1,0}, f32[16,16]{1,0})) \
all-gather-start(%a, %d), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, dimensions={0}, \
use_global_device_ids=true, backend_config={"collective_backend_config":{"is_sync":false}}
  %custom-call.1 = (f32[8,512,256]{1,2,0}, s8[4194304]{0}) custom-call(%b, %c), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"beta":0,\
"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["2"],\
"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["1"]},"epilogue":"DEFAULT"}}
  %all-gather-done.4 = (bf16[256,4]{1,0}, f32[16,16]{1,0}) all-gather-done(%all-gather-start.4)
  %permute = (f32[8,16]{1,0}, f32[8,16]{1,0}) collective-permute-start(%d), channel_id=2, \
source_target_pairs={{0,1},{1,2},{2,3}}, backend_config={"collective_backend_config":{\
"is_sync":true}}
  %permute.1 = f32[8,16]{1,0} collective-permute-done(%permute)
  %start = ((f32[8,16]{1,0}), f32[2,16]{1,0}, u32[]) async-start(%permute.1), calls=%wrapped
  ROOT %done = f32[2,16]{1,0} async-done(%start), calls=%wrapped
}
"""


def test_tpu_program() -> None:
    assert dot_flops(TPU) == 3 * 2 * (4 * 4) * 512 * 512 * 64
    [gather] = collectives(TPU)
    assert (gather.kind, gather.count, gather.is_async) == ("all-gather", 3, True)
    assert (gather.dtype, gather.buffer_bytes, gather.wire_bytes) == ("bf16", 4096, 3072)
    assert gather.op_name == "jit(step)/while/body/all_gather"


def test_gpu_program() -> None:
    assert dot_flops(GPU) == 2 * 8 * 512 * 256 * 256
    found = [(each.kind, each.dtype, each.buffer_bytes) for each in collectives(GPU)]
    assert found == [
        ("all-gather", "bf16", 256 * 4 * 2),
        ("all-gather", "f32", 16 * 16 * 4),
        ("collective-permute", "f32", 8 * 16 * 4),
        ("reduce-scatter", "f32", 8 * 16 * 4),
    ]
    assert [each.is_async for each in collectives(GPU)] == [True, True, False, False]
    assert [each.group_size for each in collectives(GPU)] == [2, 2, 4, 4]


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "window", "labels", "flops"),
    [
        # bse,ehd->bhsd and bhqk,bhkd->bqhd of a v5e program, b 4, s 512, e 256, h 4, d 64
        ("256,4,64,1", "4,512,256,1", "4,64,4,512", "size=1x4 pad=0_0x3_3 rhs_reversal=0x1",
         "f0b1_1oi0->0b1f", 2 * 4 * 512 * 256 * 4 * 64),
        ("4,4,512,64", "4,4,512,512", "4,4,512,64",
         "size=4x4 stride=4x4 pad=3_3x3_3 lhs_dilate=3x3 rhs_reversal=1x1",
         "01fb_01oi->01fb", 2 * 4 * 4 * 512 * 512 * 64),
        ("512,256", "256,128", "512,128", "", "bf_io->bf", 2 * 512 * 256 * 128),
    ],
)  # fmt: skip
def test_dots_written_as_convolutions(lhs, rhs, out, window, labels, flops) -> None:
    window = f"window={{{window}}}, " if window else ""
    text = f"""HloModule m

ENTRY %main (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[{lhs}]{{0}} parameter(0)
  %b = f32[{rhs}]{{0}} parameter(1)
  ROOT %c = f32[{out}]{{0}} convolution(%a, %b), {window}dim_labels={labels}
}}
"""
    assert dot_flops(text) == flops


@pytest.mark.parametrize(
    ("lhs", "rhs", "out", "flops"),
    [
        ((64, 32), (32, 16), (64, 16), 2 * 64 * 32 * 16),
        ((8, 64, 32), (32, 16), (8, 64, 16), 2 * 8 * 64 * 32 * 16),
        ((8, 32, 64), (8, 16, 32), (8, 64, 16), 2 * 8 * 64 * 32 * 16),
    ],
)
def test_gemms_that_state_no_dimension_numbers(lhs, rhs, out, flops) -> None:
    lhs, rhs, out = (f"f32[{','.join(map(str, dims))}]" for dims in (lhs, rhs, out))
    text = f"""HloModule m

ENTRY %main (a: f32[], b: f32[]) -> f32[] {{
  %a = {lhs} parameter(0)
  %b = {rhs} parameter(1)
  ROOT %c = {out} custom-call({lhs} %a, {rhs} %b), custom_call_target="__onednn$matmul"
}}
"""
    assert dot_flops(text) == flops


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{}", ()),
        ("{{0,4},{1,5}}", ((0, 4), (1, 5))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b','a'}", ((0, 4, 1, 5, 2, 6, 3, 7),)),
        ("mesh[a=2,b=4] {b:(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh[a=2,b=4] {a,b:(2)2}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh[a=2,b=4], device_ids=([2,4]<=[4,2]T(1,0)) {a}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh[a=2,b=2], device_ids=(3,1,0,2) {b}", ((3, 1), (0, 2))),
        ("mesh[a=1,b=4], device_ids=([2,2]T(1,0)) {b}", ((0, 2, 1, 3),)),
        ("mesh[a=2,b=2], device_ids=([4]) {b}", ((0, 1), (2, 3))),
    ],
)
def test_replica_groups_in_every_form(text: str, groups: tuple) -> None:
    assert replica_groups(text) == groups


@pytest.mark.parametrize("text", ["all", "mesh[a=2]", "[2,4]<=(8)"])
def test_an_unknown_form_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="no form known"):
        replica_groups(text)


def test_pairs_connect_rings_and_lines() -> None:
    ring = [(0, 1), (1, 0), (4, 5), (5, 4)]
    assert connected(ring) == ((0, 1), (4, 5))
    assert connected([(2, 1), (1, 0), (7, 6)]) == ((0, 1, 2), (6, 7))
    assert connected([]) == ()


@pytest.mark.parametrize(
    ("dtype", "dims", "size"),
    [
        ("f32", (2, 3), 24),
        ("bf16", (), 2),
        ("pred", (5,), 5),
        ("s4", (3,), 2),
        ("f8e4m3fn", (7,), 7),
        ("c64", (2,), 16),
        ("token", (), 0),
    ],
)
def test_shape_bytes(dtype: str, dims: tuple[int, ...], size: int) -> None:
    assert Shape(dtype, dims).bytes == size


MEMORIES = """HloModule m

ENTRY main (x: bf16[8,128]) -> (bf16[8,128], bf16[4]) {
  x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  near = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy(x)
  host = (bf16[8,128]{1,0:S(5)}, bf16[4]{0}) custom-call(near), custom_call_target="f"
  ROOT same = (bf16[8,128]{1,0:S(5)}, bf16[4]{0}) tuple(host, host)
}
"""


def test_a_shape_knows_the_memory_that_it_is_in() -> None:
    """By the S of its layout, which its neighbours in a tuple do not have; equal shapes may lie in
    two memories."""
    body = parse(MEMORIES).computations["main"]
    memories = {name: [s.memory for s in op.shapes] for name, op in body.instructions.items()}
    assert memories == {"x": [0], "near": [1], "host": [5, 0], "same": [5, 0]}
    assert body.instructions["x"].shapes == body.instructions["near"].shapes


@pytest.mark.parametrize("text", ["", "module @jit_f { func.func public @main() { return } }"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        parse(text)
