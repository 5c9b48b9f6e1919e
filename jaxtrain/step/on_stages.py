"""The pipeline of a mesh with stages: its tables, and parameters in its slots."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxtrain.experiment.resolve import Resolved
from jaxtrain.mesh.axes import STAGE
from jaxtrain.nn.module import ModuleSplit
from jaxtrain.pipeline.executor import Executor
from jaxtrain.pipeline.layout import StageLayout
from jaxtrain.pipeline.schedule import Schedule


class OnStages(NamedTuple):
    """The pipeline of a step. schedule: its table. layout: the layers of each stage. executor: runs
    the table; benchmarks use another one."""

    schedule: Schedule
    layout: StageLayout
    executor: type[Executor] = Executor


def on_stages(resolved: Resolved) -> tuple[OnStages | None, list[str]]:
    """Returns the pipeline of a mesh with stages, None if there is none, and the reasons why the
    configured one is impossible."""
    stages, model = resolved.sizes.get(STAGE, 1), resolved.description
    pipeline = resolved.experiment.execution.pipeline
    if stages == 1 or model is None or "pipeline" not in model.can:
        return None, []
    try:
        schedule = pipeline.table(stages=stages, microbatches=resolved.experiment.microbatches)
    except ValueError as error:
        return None, [f"execution.pipeline: {error}"]
    except OSError as error:
        return None, [f"execution.pipeline: {pipeline.schedule} cannot be read: {error.strerror}"]
    return OnStages(schedule, StageLayout(model.periods, stages, schedule.chunks)), []


def split_in_slots(split: ModuleSplit, layout: StageLayout) -> ModuleSplit:
    """Returns the stacked parameters and their axes in slots, as they rest on stages."""
    stacked = {k for k, axes in split.axes.items() if "layers" in axes}
    params = {
        k: jax.eval_shape(layout.to_slots, leaf) if k in stacked else leaf
        for k, leaf in split.params.items()
    }
    axes = {k: layout.axes(names) if k in stacked else names for k, names in split.axes.items()}
    return split._replace(params=params, axes=axes)
