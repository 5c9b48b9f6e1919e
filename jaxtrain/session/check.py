"""Reports an experiment on a mesh without a device: sharding and bytes of each leaf."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from operator import floordiv
from pathlib import Path
from typing import Any

import jax

from jaxtrain.data import BigramChain, TextData
from jaxtrain.data.synthetic import NO_TEXT
from jaxtrain.experiment import Experiment, config_of, load_experiment
from jaxtrain.experiment.stored import unreadable
from jaxtrain.files.cache import cache_directory
from jaxtrain.files.pointer import StoreFailed
from jaxtrain.mesh.axes import Dims
from jaxtrain.mesh.memory_pool import told_fraction
from jaxtrain.mesh.mesh import MeshSpec, load_mesh
from jaxtrain.mesh.sharding import Leaf, LogicalAxes, ways
from jaxtrain.models.stage import stream_share
from jaxtrain.pipeline.analysis import bubble, cost, slots
from jaxtrain.pipeline.overhead import published_in_flight
from jaxtrain.pipeline.schedule import make_schedule
from jaxtrain.reprs import PrintedReport, aligned
from jaxtrain.session.branch import Branch
from jaxtrain.session.held_out import HeldOutRows
from jaxtrain.session.held_out_sets import absent_sets, for_each, open_all
from jaxtrain.session.lineage import branch_from
from jaxtrain.session.memory import argument_bytes, memory_violations, parameter_counts
from jaxtrain.session.notes import notes
from jaxtrain.session.rows import open_split, sample_violations
from jaxtrain.session.tasks import absent_tasks
from jaxtrain.step.assembly import Assembly, try_assemble
from jaxtrain.step.batches import fields_of
from jaxtrain.step.losses import trace_loss
from jaxtrain.tokenizers import BpeTokenizer, ByteTokenizer, TokenizerFile
from jaxtrain.tokenizers.protocol import document_start
from jaxtrain.validation.experiment import format_violations
from jaxtrain.weights.start import settled_start

MUCH = 0.4
"""Bubble share above which `check` suggests more microbatches."""


@dataclass(frozen=True, repr=False)
class CheckReport(PrintedReport):
    """parameters: all of them, without padded rows of the vocabulary and padded slots of a
    pipeline; trained: those that are not frozen.

    bytes_per_device: parts as in `memory.argument_bytes`, and their total: the argument bytes of
    the compiled step. notes: settings that run, but may not be what was intended. branch: what is
    kept of the other run and which fields differ, "" for a run that is no branch.
    """

    assembly: Assembly
    parameters: int
    trained: int
    bytes_per_device: dict[str, int]
    notes: tuple[str, ...] = ()
    branch: str = ""

    def table(self) -> str:
        """Table of the parameters: path, shape, sharding, bytes on one device; and the sharding of
        the optimizer state where it differs (ZeRO-1, ZeRO-2)."""
        places = self.assembly.places.values()
        header = ["leaf", "shape", "split over", "bytes per device"]
        rows = [[p.path, _shape(p), _split(p.axes, p.params), self._bytes(p)] for p in places]
        if any(p.params != p.optimizer for p in places):
            header.insert(3, "optimizer state over")
            for row, p in zip(rows, places, strict=True):
                row.insert(3, _split(p.axes, p.optimizer))
        return "\n".join(aligned([header, *rows], left=len(header) - 1))

    def _bytes(self, place: Leaf) -> str:
        itemsize = self.assembly.abstract.params[place.path].dtype.itemsize
        return f"{place.local_size(self.assembly.sizes) * itemsize:,}"

    def summary(self) -> str:
        """Two lines: parameters and mesh; bytes on each device, and the pipeline. Then one line if
        the share of a GPU's memory is limited, one for a branch, and one line for each note."""
        spec = self.assembly.spec
        sizes = " x ".join(f"{a}={n}" for a, n in self.assembly.sizes.items()) or "one device"
        parts = ", ".join(f"{name} {count:,}" for name, count in self.bytes_per_device.items())
        trained = "" if self.trained == self.parameters else f", {self.trained:,} of them trained,"
        machine = f"{spec.where} ({sizes}, {self.assembly.mode})"
        lines = [
            f"{self.parameters:,} parameters{trained} on {machine}",
            f"bytes per device: {parts}{self._pipeline_line()}",
            *filter(None, [told_fraction(spec), self.branch]),
        ]
        return "\n".join([*lines, *map("note: {}".format, self.notes)])

    def as_json(self) -> dict[str, Any]:
        """Report for scripts; `pipeline` is present only on a mesh with stages, `branch` only for
        one."""
        report = {"bytes_per_device": self.bytes_per_device, "notes": list(self.notes)}
        of_some = {"pipeline": self.pipeline(), "branch": self.branch or None}
        return report | {name: value for name, value in of_some.items() if value is not None}

    def pipeline(self) -> dict[str, Any] | None:
        """The schedule on a mesh with stages, else None: its shape, `ticks`, `cost` (forward passes
        of a stage, B counted as two), `bubble` (share of the step) and `buffers` of every stage:
        for inputs and cotangents of `activation_bytes` each, for what F keeps (residuals) and B
        leaves to W (stashes) of one microbatch. `published_in_flight`: activations that each stage
        keeps at once if stages are not in step, or None. `layers`: their number; `slots`: layers
        and padding."""
        if self.assembly.pipeline is None:
            return None
        schedule, layout = self.assembly.pipeline.schedule, self.assembly.pipeline.layout
        e = self.assembly.experiment
        field = self.assembly.described.tokens
        tokens, splits = self.assembly.abstract_batch()[field], self.assembly.batch_splits
        parts = (ways(axes, self.assembly.sizes) for axes in splits[field])
        _, rows, seq = map(floordiv, tokens.shape, parts)
        share = rows * seq // ways(self.assembly.roles.stream, self.assembly.sizes)
        stream = stream_share(self.assembly.described, share, e.precision.compute)
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
            "activation_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stream)),
            "layers": layout.layers,
            "slots": layout.layers + layout.padding,
        }

    def _fuller(self) -> str:
        """Returns a suggestion of more microbatches for a pipeline with a large bubble, else ""."""
        schedule = self.assembly.on_stages.schedule
        if bubble(schedule) < MUCH or self.assembly.experiment.execution.pipeline.of_file:
            return ""
        more = 4 * schedule.stages
        fuller = make_schedule(schedule.kind, schedule.stages, more, schedule.chunks)
        return f"; microbatches={more} would make the bubble {bubble(fuller):.1%}"

    def _pipeline_line(self) -> str:
        report = self.pipeline()
        if report is None:
            return ""
        chunks, buffers = report["chunks"], report["buffers"].items()
        cut = f"{report['stages']} stages" + (f" x {chunks} chunks" if chunks > 1 else "")
        m = report["microbatches"]
        line = (
            f"\npipeline: {report['schedule']}, {cut}, {m} microbatch{'es' if m > 1 else ''}: "
            f"{report['ticks']} ticks, cost {report['cost']:g} forward passes of a stage, bubble "
            f"{report['bubble']:.1%}; buffers: {', '.join(f'{k} {n}' for k, n in buffers)}, "
            f"an input of {report['activation_bytes']:,} bytes{_elsewhere(report)}{self._fuller()}"
        )
        layers, room = report["layers"], report["slots"]
        if room == layers:
            return line
        blocks = len(self.assembly.described.period)
        unit = "layers" if blocks == 1 else f"periods of {blocks} layers"
        stand = "stands" if room == layers + 1 else "stand"
        return (
            f"{line}; {layers} {unit} in {room} slots of {cut}: {room - layers} {stand} idle, "
            f"{room / layers - 1:.1%} more arithmetic in the blocks"
        )


def check(
    experiment: Experiment | str | Path,
    mesh: MeshSpec | str | Path,
    *,
    data_here: bool = True,
    from_run: str | Path | None = None,
) -> CheckReport:
    """Returns a report of the experiment on this mesh; needs no device of the mesh.

    data_here: False if the data files are on another machine; then they are not looked for.
    from_run: RUN or RUN@STEP, of which the run is to be a branch, as for `train`. Raises ValueError
    with all violations at once: of the two files, the data, the starting parameters or the step to
    branch off after, and a state too large for the chip.
    """
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    spec, mistyped = load_mesh(mesh), _of_other_kinds(experiment)
    branch, refused = _branch(from_run, experiment.steps)
    try:
        fields, held_out, absent = _look_at(experiment, data_here=data_here)
        assembly, violations = try_assemble(experiment, spec, fields)
    except Exception:
        if not mistyped:
            raise
        raise ValueError(
            format_violations(mistyped, spec)
        ) from None  # what else reads those values may fail
    violations += absent + refused
    violations = [text for text in mistyped if not _already_reported(text, violations)] + violations
    if assembly is not None:
        if assembly.experiment.microbatches >= 1:  # else there is no batch
            violations += memory_violations(assembly)
        violations += _held_out_violations(assembly, held_out)
        try:
            if branch is not None:
                branch.refuse_unfit(assembly)
                branch.skips(experiment, None)
            elif not refused and not assembly.adapter_violations:
                settled_start(assembly)
        except ValueError as error:
            if not violations:
                raise
            violations.append(str(error))
    if assembly is None or violations:
        raise ValueError(format_violations(violations, spec))
    if assembly.description is None:
        trace_loss(assembly)
    weights = argument_bytes(assembly)
    weights["total"] = sum(weights.values())
    counts = parameter_counts(assembly)
    trained = sum(n for k, n in counts.items() if k not in assembly.frozen)
    comparison = "" if branch is None else branch.comparison(experiment)
    report = (assembly, sum(counts.values()), trained, weights, tuple(notes(assembly)), comparison)
    return CheckReport(*report)


def _branch(from_run: str | Path | None, steps: int) -> tuple[Branch | None, list[str]]:
    """Returns where a run is to begin, None for nowhere, and why it cannot."""
    try:
        return branch_from(from_run, None, steps, fresh=False), []
    except ValueError as error:
        return None, [f"from_run (--from): {error}"]


def _of_other_kinds(experiment: Experiment) -> list[str]:
    """Violations: values whose type does not match the field. Empty for an experiment that cannot
    be stored (with a lambda in it): it trains in memory and is never read back."""
    try:
        config = {"experiment": config_of(experiment)}
    except ValueError:
        return []
    return unreadable(config)


def _already_reported(violation: str, reported: list[str]) -> bool:
    """True if `reported` has a violation of the same field."""
    field = violation.removeprefix("experiment.").partition(" is ")[0]
    return any(other.startswith(f"{field}=") for other in reported)


def _look_at(experiment: Experiment, *, data_here: bool) -> tuple[Any, Any, list[str]]:
    """Returns the fields of a batch (None for text data); the held-out rows of other data by name,
    if they are evaluated and here; and violations: data missing on this machine. User datasets are
    opened: only their rows show the fields."""
    data, cache_dir = experiment.data, cache_directory()
    is_evaluated = experiment.evaluation is not None
    held_out: dict[str, Any] = {}
    if hasattr(data, "seq") and hasattr(data, "isolate_documents"):
        splits = ("train", "held_out") if is_evaluated else ("train",)
        missing = data.absent(splits) if data_here and hasattr(data, "absent") else []
        missing = [f"data: {text}" for text in missing]
        if data_here:
            missing += [*absent_sets(experiment, cache_dir), *_wrong_sample(experiment)]
        return None, {}, missing + (absent_tasks(experiment) if data_here else [])
    fields: Any = {}
    violations = absent_tasks(experiment) if data_here else []
    saved = experiment.checkpoints is not None
    try:
        fields = fields_of(open_split(experiment, "train", cache_dir, saved=saved), data)
    except ValueError as error:
        violations.append(f"data: {error}")
    try:
        if is_evaluated and data_here and not violations:
            held_out = open_all(experiment, fields, cache_dir)
    except ValueError as error:
        violations.append(f"data: {error}")
    except Exception as error:  # whatever the user's code raises for a split that it lacks
        violations.append(
            f"data: {type(data).__name__}.open('held_out') raised {type(error).__name__}: {error}; "
            "give held-out rows, or use evaluation=None"
        )
    return fields, held_out, violations


def _wrong_sample(experiment: Experiment) -> list[str]:
    """Returns a violation where the tokenizer is known before the data is opened and does not
    encode the sample's prompt."""
    data, sample = experiment.data, experiment.sample
    if sample is None:
        return []
    if isinstance(data, BigramChain):
        return [f"evaluation.sample: {NO_TEXT}"]
    tokenizer = data.tokenizer if isinstance(data, TextData) else None
    if isinstance(tokenizer, BpeTokenizer) and sample.chat:
        return sample_violations(experiment, lambda _: [0], lambda: None)  # it has no template
    if isinstance(tokenizer, ByteTokenizer) and sample.chat:  # without, fields alone say it
        return sample_violations(experiment, tokenizer.encode, lambda: tokenizer)
    if not isinstance(tokenizer, TokenizerFile) or tokenizer.absent():
        return []
    try:
        vocabulary = tokenizer.build(lambda: iter(()), corpus="", cache_dir=Path())
    except StoreFailed:
        raise
    except ValueError as error:
        return [f"data: {error}"]
    encode = partial(document_start, vocabulary)
    return sample_violations(experiment, encode, lambda: vocabulary)


def _held_out_violations(assembly: Assembly, held_out: dict[str, Any]) -> list[str]:
    try:
        for_each(held_out, partial(HeldOutRows, assembly))
    except ValueError as error:
        return [f"data: {error}"]
    return []


def _elsewhere(pipeline: dict[str, Any]) -> str:
    in_flight = pipeline["published_in_flight"]
    return "" if in_flight is None else f"; stages that do not go in step keep {max(in_flight)}"


def _shape(leaf: Leaf) -> str:
    named = zip(leaf.axes, leaf.shape, strict=True)
    return "[" + ", ".join(f"{axis or '-'} {size}" for axis, size in named) + "]"


def _split(axes: LogicalAxes, split: Dims) -> str:
    parts = [f"{axis}: {'*'.join(d)}" for axis, d in zip(axes, split, strict=True) if d]
    return ", ".join(parts) or "whole"
