"""A saved model as a module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.run_config import NAME
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.inspection.opened import mesh_spec, stored_model
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.models.layered import ModelConfig
from jaxtrain.nn.module import put_together
from jaxtrain.session.lineage import refuse_no_directory
from jaxtrain.step.layer_order import AtRest
from jaxtrain.weights import loading
from jaxtrain.weights.run_step import run_and_step


def load(
    run: str | Path,
    *,
    mesh: MeshSpec | str | Path | None = None,
    averaged: bool | None = None,
    trust: Trust = (),
) -> Any:
    """Returns the model of a run or of a folder as `transformers` writes it: an `nnx.Module` with
    its parameters, in the run's dtype. A decoder has `logits(tokens)`, and adapters are merged into
    its matrices; a model of your own has what its class has, and is in `eval()` mode.

    run: RUN or RUN@STEP, a run directory and a saved step, its newest if none is given; or a
    folder. mesh: what the parameters are split over, as `fsdp() | tensor()` does; None for one
    device. averaged: the averaged weights; None where the run keeps any. trust: modules of your own
    that the run may name. Raises ValueError where there is no such run, step or average, or the run
    names what is not trusted, and DamagedCheckpoint.
    """
    path, step = run_and_step(run)
    refuse_no_directory(path)
    if not (path / NAME).is_file() and not loading.is_run(path):
        raise ValueError(f"{path} is no run and no folder of weights: it has no {NAME}")
    spec = mesh_spec(mesh)
    if not loading.is_run(path) or isinstance(
        stored_field(path, "model", trust=trust), ModelConfig
    ):
        loaded = loading.load(path, step=step, averaged=averaged, mesh=spec, trust=trust)
        return put_together(loading.static_of(loaded.config), loaded.params)
    stored = stored_model(run, _NoData(), averaged=averaged, trust=trust)
    experiment = replace(stored.experiment, batch=spec.devices, microbatches=1)  # of no batch
    assembly, devices = replace(stored, experiment=experiment).on(spec)
    state = stored.state(AtRest(assembly, devices))
    model = put_together(assembly.split.static, {**state.params, **state.ema, **state.model_state})
    model.eval()
    return model


class _NoData:
    """Stands for data where none is read."""

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        raise AssertionError("a module reads no data")
