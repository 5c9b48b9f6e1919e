"""The FLOP counter against published closed forms and against counting one by one."""

from __future__ import annotations

import ast
import inspect

import pytest

from jaxtrain.telemetry import flops
from jaxtrain.telemetry.flops import AttentionFlops, Matmul, forward_flops, mfu, train_flops


@pytest.mark.parametrize("window", [None, 1, 3, 7, 8, 100])
@pytest.mark.parametrize("seq", [1, 2, 7, 8])
def test_pairs_are_those_of_the_mask(seq: int, window: int | None) -> None:
    unmasked = [
        (q, k) for q in range(seq) for k in range(q + 1) if window is None or q - k < window
    ]
    assert AttentionFlops(1, 1, window).pairs(seq) == len(unmasked)
    assert AttentionFlops(1, 1, causal=False).pairs(seq) == seq * seq


def test_palm_appendix_b() -> None:
    """Per token 6N + 12LHQT (Chowdhery et al. 2022), here for all tokens of a batch."""
    layers, heads, dim, seq, batch = 4, 8, 32, 256, 16
    matmuls = [
        Matmul("attention", 256, 4 * 256, layers),
        Matmul("mlp", 256, 3 * 1024, layers),
        Matmul("head", 256, 4096),
    ]
    n = layers * (4 * 256 * 256 + 3 * 256 * 1024) + 256 * 4096
    counted = forward_flops(
        matmuls, [AttentionFlops(heads, dim, count=layers)], seq=seq, sequences=batch
    )
    assert counted.train_full == batch * seq * (6 * n + 12 * layers * heads * dim * seq)
    attention_causal = counted.train_causal - train_flops(counted.matmul)
    assert attention_causal == batch * 6 * layers * heads * dim * seq * (seq + 1)


def test_mixed_windows_and_value_dim_add_up() -> None:
    layers = [AttentionFlops(2, 4, window=3, count=2), AttentionFlops(2, 4, value_dim=8)]
    counted = forward_flops([], layers, seq=5)
    assert counted.matmul == 0
    assert counted.attention_full == 2 * 25 * 2 * (4 + 4) * 2 + 2 * 25 * 2 * (4 + 8)
    assert counted.attention_causal == 2 * 12 * 2 * (4 + 4) * 2 + 2 * 15 * 2 * (4 + 8)


def test_mfu_of_a_machine_that_does_nothing_else() -> None:
    assert mfu(8e12, step_s=2.0, peak_flops_per_device=1e12, devices=4) == pytest.approx(1.0)
    assert mfu(8e12, step_s=4.0, peak_flops_per_device=1e12, devices=8) == pytest.approx(0.25)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AttentionFlops(1, 1, window=0),
        lambda: AttentionFlops(1, 1, window=4, causal=False),
        lambda: forward_flops([], [], seq=0),
        lambda: forward_flops([], [], seq=4, sequences=0),
        lambda: mfu(1.0, step_s=0.0, peak_flops_per_device=1.0, devices=1),
    ],
)
def test_what_makes_no_sense_is_refused(wrong) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        wrong()


def test_the_counter_imports_no_tracer() -> None:
    imports = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(flops)))
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert modules == {"__future__", "collections.abc", "dataclasses"}
