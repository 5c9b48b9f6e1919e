"""Scratch memory of a library's kernels against sizes seen on a GPU."""

from __future__ import annotations

import pytest

from jaxtrain.program.roofline import roofline
from jaxtrain.program.scratch import uncounted_scratch, with_scratch

PROGRAM = """HloModule attention, is_scheduled=true

ENTRY main (q: bf16[12,4096,32,64], k: bf16[12,4096,8,64], s: f32[768,32,4096], n: s32[12,64]) -> bf16[12,32,4096,64] {{
  q = bf16[12,4096,32,64]{{3,2,1,0}} parameter(0)
  k = bf16[12,4096,{keys},64]{{3,2,1,0}} parameter(1)
  s = f32[{sequences},32,4096]{{2,1,0}} parameter(2)
  n = s32[12,64]{{1,0}} parameter(3)
  small = f32[4,32,4096]{{2,1,0}} parameter(4)
  own = (bf16[12,32,4096,64]{{3,1,2,0}}, bf16[12,{keys},4096,64]{{3,1,2,0}}, bf16[12,{keys},4096,64]{{3,1,2,0}}, u8[0]{{0}}) custom-call(q, k, k, small, q, q, n, n), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  all = (bf16[12,32,4096,64]{{3,1,2,0}}, bf16[12,{keys},4096,64]{{3,1,2,0}}, bf16[12,{keys},4096,64]{{3,1,2,0}}, u8[{stated}]{{0}}) custom-call(q, k, k, s, q, q, n, n), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  ROOT dq = bf16[12,32,4096,64]{{3,1,2,0}} get-tuple-element(all), index=0
}}
"""  # noqa: E501


def program(stated: int = 0, keys: int = 8, sequences: int = 768) -> str:
    return PROGRAM.format(stated=stated, keys=keys, sequences=sequences)


def test_scratch_is_what_a_gpu_took_of_the_largest_kernel() -> None:
    """Of a step that took this many bytes more on an H200 than a compiler without one had said."""
    seen = 114_968_758_852 - 63_026_300_740
    assert uncounted_scratch(program()) == pytest.approx(seen, rel=1e-5)
    assert uncounted_scratch(program(sequences=96)) == uncounted_scratch(program()) // 8


def test_gradients_of_keys_need_none_where_no_heads_share_them() -> None:
    shared, own = uncounted_scratch(program()), uncounted_scratch(program(keys=32))
    assert shared - own == 2 * 2 * 64 * 768 * 32 * 4096


def test_what_the_compiler_has_counted_is_not_counted_twice() -> None:
    memory = {"temp_bytes": 5, "peak_bytes": 7}
    absent = with_scratch(memory, program())
    assert absent["peak_bytes"] == 7 + absent["scratch_bytes"] and absent["temp_bytes"] == 5
    small = uncounted_scratch(program(sequences=4))
    assert with_scratch(memory, program(stated=100))["scratch_bytes"] == small
    assert with_scratch(memory, "HloModule none") == memory
    assert with_scratch({"peak_bytes": None}, program())["peak_bytes"] is None


def test_scratch_takes_no_time_in_the_roofline() -> None:
    seconds = [
        roofline(program(stated), peak_flops=1e12, bandwidth_gbytes=1).seconds
        for stated in (0, 10**12)
    ]
    assert seconds[0] == seconds[1] > 0
