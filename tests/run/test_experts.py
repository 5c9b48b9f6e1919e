"""A run with experts from mesh to mesh: its biases and tallies are saved, and its metrics told."""

from __future__ import annotations

from pathlib import Path

import pytest

import jaxtrain
from jaxtrain.moe import Balance, SigmoidRouter
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.transformer import SharedExpert

MOE = jaxtrain.MoeConfig(
    16,
    experts=4,
    router=SigmoidRouter(bias=True),
    shared=SharedExpert(8),
    balance=Balance(0.1, 0.01, 1e-3),
)
EXPERIMENT = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(
        vocab=257,
        embed=16,
        layers=2,
        period=(jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=4), MOE),),
        vocab_multiple=8,
    ),
    data=jaxtrain.TextData(seq=16),
    optimizer=jaxtrain.AdamW(1e-2),
    steps=3,
    batch=16,
    evaluation=None,
    checkpoints=jaxtrain.SavePolicy(every=2),
    logging=jaxtrain.Logging(every=1, tensorboard=False),
)


class Stop(jaxtrain.Callback):
    def after_step(self, run: jaxtrain.Run, step: int) -> None:
        if step == 2:
            run.stop()


@pytest.mark.slow
def test_a_run_goes_on_where_experts_are_apart_and_speaks(tmp_path: Path) -> None:
    whole = jaxtrain.train(EXPERIMENT, jaxtrain.mesh_from_axes(fsdp=2), run_dir=tmp_path / "whole")
    run, apart = tmp_path / "run", jaxtrain.mesh_from_axes(expert=2, tensor=2)
    jaxtrain.train(EXPERIMENT, jaxtrain.mesh_from_axes(fsdp=2), run_dir=run, callbacks=[Stop()])
    jaxtrain.train(EXPERIMENT, apart, run_dir=run)
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line, wanted in zip(lines, whole.history, strict=True):
        for name in ("loss", "balance_loss", "router_z_loss", "router_entropy"):
            assert line[name] == pytest.approx(wanted[name], rel=1e-5)
        assert line["layer_1/expert_load"] == wanted["layer_1/expert_load"]
        assert sum(line["layer_1/expert_load"]) == pytest.approx(4.0)
    assert len(jaxtrain.generate_text(run, "ab", tokens=3)) >= 1
