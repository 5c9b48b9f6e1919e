"""An experiment on a mesh, told without a device: where each leaf lives and what it weighs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import floordiv
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxtrain.experiment import Experiment, config_of, load_experiment
from jaxtrain.experiment.stored import unreadable
from jaxtrain.files.cache import cache_directory
from jaxtrain.mesh.memory_pool import told_fraction
from jaxtrain.mesh.mesh import MeshSpec, load_mesh
from jaxtrain.mesh.sharding import Dims, Leaf, LogicalAxes, PaddedAxis, ways
from jaxtrain.models.buffers import without_buffers
from jaxtrain.pipeline.analysis import bubble, cost, slots
from jaxtrain.pipeline.layout import CHUNKS
from jaxtrain.pipeline.overhead import published_in_flight
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.run.memory import argument_bytes, memory_violations
from jaxtrain.run.notes import notes
from jaxtrain.run.rows import open_split
from jaxtrain.step.assembly import Assembly, try_assemble
from jaxtrain.step.batches import fields_of
from jaxtrain.step.layer_order import natural_shapes
from jaxtrain.step.pipeline import activation_share
from jaxtrain.step.train_step import trace_loss
from jaxtrain.validation.experiment import format_violations
from jaxtrain.weights.start import settled_start

MUCH = 0.4
"""A bubble of which `check` says what would make it smaller."""


@dataclass(frozen=True)
class CheckReport:
    """parameters: all of them, the padded rows of the vocabulary not counted, nor the padded slots
    of a pipeline; trained: those that are not frozen.

    bytes_per_device: of `memory.argument_bytes`; and total, which is the compiled step's argument
    bytes. notes: what runs, and is perhaps not what was meant.
    """

    assembly: Assembly
    parameters: int
    trained: int
    bytes_per_device: dict[str, int]
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Each parameter: path, shape, how it rests, its bytes on one device; and how its optimizer
        state rests where that is another way (ZeRO-1, ZeRO-2)."""
        places = self.assembly.places.values()
        header = ["leaf", "shape", "split over", "bytes per device"]
        rows = [[p.path, _shape(p), _split(p.axes, p.params), self._bytes(p)] for p in places]
        if any(p.params != p.optimizer for p in places):
            header.insert(3, "optimizer state over")
            for row, p in zip(rows, places, strict=True):
                row.insert(3, _split(p.axes, p.optimizer))
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        return "\n".join(_line(row, widths) for row in [header, *rows])

    def _bytes(self, place: Leaf) -> str:
        itemsize = self.assembly.abstract.params[place.path].dtype.itemsize
        return f"{place.local_size(self.assembly.sizes) * itemsize:,}"

    def summary(self) -> str:
        """Two lines: the parameters and the mesh; the bytes on each device. One more of a pipeline,
        and of what a program may take of a GPU; then the notes, a line each."""
        spec = self.assembly.spec
        sizes = " x ".join(f"{a}={n}" for a, n in self.assembly.sizes.items()) or "one device"
        parts = ", ".join(f"{name} {count:,}" for name, count in self.bytes_per_device.items())
        moved = "" if self.trained == self.parameters else f", {self.trained:,} of them trained,"
        where = f"{spec.where} ({sizes}, {self.assembly.mode})"
        lines = [
            f"{self.parameters:,} parameters{moved} on {where}",
            f"bytes per device: {parts}{self._pipeline_line()}",
            *filter(None, [told_fraction(spec)]),
        ]
        return "\n".join([*lines, *map("note: {}".format, self.notes)])

    def as_json(self) -> dict[str, Any]:
        """What scripts may rely on; `pipeline` is there only on a mesh with stages."""
        pipeline = self.pipeline()
        found = {"bytes_per_device": self.bytes_per_device, "notes": list(self.notes)}
        return found | ({} if pipeline is None else {"pipeline": pipeline})

    def pipeline(self) -> dict[str, Any] | None:
        """Of the schedule: its shape, `ticks`, `cost` (in forward passes of a stage, B as two),
        `bubble` (a share of the step) and `buffers` of every stage: for inputs and cotangents, of
        `activation_bytes` each; for what F keeps (residuals) and B leaves to W (stashes) of one
        microbatch. `published_in_flight`: how many works' activations each stage keeps at once
        where stages are not in step, or None. Of the layers how many there are and in how many
        `slots`."""
        if self.assembly.pipeline is None:
            return None
        schedule, layout = self.assembly.pipeline.schedule, self.assembly.pipeline.layout
        e = self.assembly.experiment
        field = self.assembly.described.tokens
        tokens, splits = self.assembly.abstract_batch()[field], self.assembly.batch_splits
        parts = (ways(axes, self.assembly.sizes) for axes in splits[field])
        _, rows, seq = map(floordiv, tokens.shape, parts)
        share = activation_share(self.assembly, rows, seq)
        published = published_in_flight(schedule)
        return {
            "schedule": schedule.kind,
            "stages": schedule.stages,
            "chunks": schedule.chunks,
            "microbatches": schedule.microbatches,
            "ticks": schedule.ticks,
            "cost": cost(schedule),
            "bubble": bubble(schedule),
            "buffers": slots(schedule, keep_residuals=e.execution.pipeline.keeps_residuals),
            "published_in_flight": None if published is None else published[1],
            "activation_bytes": math.prod(share) * jnp.dtype(e.precision.compute).itemsize,
            "layers": layout.layers,
            "slots": layout.layers + layout.padding,
        }

    def _fuller(self) -> str:
        """What more microbatches would do for a pipeline that idles too long."""
        schedule = self.assembly.on_stages.schedule
        if bubble(schedule) < MUCH or self.assembly.experiment.execution.pipeline.of_file:
            return ""
        more = 4 * schedule.stages
        fuller = make_schedule(schedule.kind, schedule.stages, more, schedule.chunks)
        return f"; microbatches={more} would make the bubble {bubble(fuller):.1%}"

    def _pipeline_line(self) -> str:
        found = self.pipeline()
        if found is None:
            return ""
        chunks, held = found["chunks"], found["buffers"].items()
        cut = f"{found['stages']} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
        m = found["microbatches"]
        line = (
            f"\npipeline: {found['schedule']}, {cut}, {m} microbatch{'es' if m > 1 else ''}: "
            f"{found['ticks']} ticks, cost {found['cost']:g} forward passes of a stage, bubble "
            f"{found['bubble']:.1%}; buffers: {', '.join(f'{k} {n}' for k, n in held)}, "
            f"an input of {found['activation_bytes']:,} bytes{_elsewhere(found)}{self._fuller()}"
        )
        layers, room = found["layers"], found["slots"]
        if room == layers:
            return line
        blocks = len(self.assembly.described.period)
        what = "layers" if blocks == 1 else f"periods of {blocks} layers"
        stand = "stands" if room == layers + 1 else "stand"
        return (
            f"{line}; {layers} {what} in {room} slots of {cut}: {room - layers} {stand} idle, "
            f"{room / layers - 1:.1%} more arithmetic in the blocks"
        )


def check(
    experiment: Experiment | str | Path, mesh: MeshSpec | str | Path, *, data_here: bool = True
) -> CheckReport:
    """What the experiment is on this mesh; needs no device of it.

    data_here: False where the files of the data are on another machine; then they are not looked
    for. Raises ValueError with every violation at once: of the two files, of the data, of what the
    run begins with, and a state that the chip has no room for.
    """
    return _report(experiment, mesh, data_here=data_here, held_to_memory=True)


def check_anywhere(experiment: Experiment | str | Path, mesh: MeshSpec | str | Path) -> CheckReport:
    """`check` wherever the data is, whatever the chip has room for. Raises ValueError with every
    other violation."""
    return _report(experiment, mesh, data_here=False, held_to_memory=False)


def _report(experiment: Any, mesh: Any, *, data_here: bool, held_to_memory: bool) -> CheckReport:
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    spec, strange = load_mesh(mesh), _of_other_kinds(experiment)
    try:
        fields, absent = _look_at(experiment, data_here=data_here)
        assembly, found = try_assemble(experiment, spec, fields)
    except Exception:
        if not strange:
            raise
        raise ValueError(
            format_violations(strange, spec)
        ) from None  # what else reads those values may fail
    found += absent
    found = [each for each in strange if not _already_found(each, found)] + found
    if assembly is not None:
        found += memory_violations(assembly) if held_to_memory else []
        try:
            settled_start(assembly)
        except ValueError as error:
            if not found:
                raise
            found.append(str(error))
    if assembly is None or found:
        raise ValueError(format_violations(found, spec))
    if assembly.description is None:
        trace_loss(assembly)
    weights = argument_bytes(assembly)
    weights["total"] = sum(weights.values())
    shapes = natural_shapes(assembly).params
    places = without_buffers(assembly.places, assembly.buffers)
    counts = {k: _count(shapes[k].shape, p) for k, p in places.items()}
    trained = sum(n for k, n in counts.items() if k not in assembly.frozen)
    return CheckReport(assembly, sum(counts.values()), trained, weights, tuple(notes(assembly)))


def _of_other_kinds(experiment: Experiment) -> list[str]:
    """Values of other kinds than their fields'. An experiment that cannot be stored, with a lambda
    in it, trains in memory, and nobody reads it again."""
    try:
        config = {"experiment": config_of(experiment)}
    except ValueError:
        return []
    return unreadable(config)


def _already_found(strange: str, found: list[str]) -> bool:
    """Whether another violation is of the same field."""
    field = strange.removeprefix("experiment.").partition(" is ")[0]
    return any(each.startswith(f"{field}=") for each in found)


def _look_at(experiment: Experiment, *, data_here: bool) -> tuple[Any, list[str]]:
    """The fields of a batch, None for those of text; and what of the data is not here. Only data of
    one's own is opened: there is no other way to know what it gives."""
    data = experiment.data
    if hasattr(data, "seq") and hasattr(data, "isolate_documents"):
        splits = ("train", "held_out") if experiment.evaluation is not None else ("train",)
        absent = data.absent(splits) if data_here and hasattr(data, "absent") else []
        return None, [f"data: {each}" for each in absent]
    try:
        opened = open_split(
            experiment, "train", cache_directory(), saved=experiment.checkpoints is not None
        )
    except ValueError as error:
        return {}, [f"data: {error}"]
    return fields_of(opened, data), []


def _count(shape: tuple[int, ...], leaf: Leaf) -> int:
    """`shape`: in natural layer order. Padded rows do not count."""
    named = zip((axis for axis in leaf.axes if axis != CHUNKS), shape, strict=True)
    return math.prod(axis.real if isinstance(axis, PaddedAxis) else size for axis, size in named)


def _elsewhere(pipeline: dict[str, Any]) -> str:
    held = pipeline["published_in_flight"]
    return "" if held is None else f", where stages not in step keep {max(held)} works'"


def _line(row: list[str], widths: list[int]) -> str:
    """Words to the left, the number in the last column to the right."""
    cells = [cell.ljust(w) for cell, w in zip(row[:-1], widths[:-1], strict=True)]
    return "  ".join([*cells, row[-1].rjust(widths[-1])])


def _shape(leaf: Leaf) -> str:
    named = zip(leaf.axes, leaf.shape, strict=True)
    return "[" + ", ".join(f"{axis or '-'} {size}" for axis, size in named) + "]"


def _split(axes: LogicalAxes, split: Dims) -> str:
    parts = [f"{axis}: {'*'.join(d)}" for axis, d in zip(axes, split, strict=True) if d]
    return ", ".join(parts) or "whole"
