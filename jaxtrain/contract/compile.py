"""Compiles an experiment for a present or absent mesh, and reports memory, FLOPs and bytes sent."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from jaxtrain.attention.kernels import Reference
from jaxtrain.contract.contract import Contract, Key, collective_totals, contract, key_of
from jaxtrain.experiment import Experiment, load_experiment
from jaxtrain.mesh.absent import absent_mesh
from jaxtrain.mesh.compiler_options import option_violations
from jaxtrain.mesh.links import bytes_per_s
from jaxtrain.mesh.memory_pool import memory_fraction
from jaxtrain.mesh.mesh import MeshSpec, make_mesh
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.operations.block import attentions, mixtures
from jaxtrain.planner.arithmetic import asked_flops, least_kernel_flops, opaque_flops
from jaxtrain.planner.assembled import steady, why_not_predicted
from jaxtrain.planner.overhead import Overhead, overhead
from jaxtrain.planner.seconds import matmul_seconds
from jaxtrain.program.branches import branch_violations
from jaxtrain.program.collectives import collectives, dot_flops, opaque_kernels, peak_memory
from jaxtrain.program.order import side_by_side
from jaxtrain.program.overlap import Overlap, Tally, overlaps, tally
from jaxtrain.program.roofline import Roofline, roofline
from jaxtrain.program.scratch import with_scratch
from jaxtrain.program.stablehlo import lowered_collectives
from jaxtrain.program.text import program_text
from jaxtrain.reprs import PrintedReport, aligned
from jaxtrain.session.check import CheckReport, check
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.running_kernels import documents_room, kernels_of
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import trace_step
from jaxtrain.violations import raise_violations

CompilerLog = Callable[[], AbstractContextManager[Callable[[], str]]]
"""Gives what the compiler writes to the process's standard error while the context is open."""

REMATERIALISED = "Involuntary full rematerialization"
SQUEEZED = re.compile(r"Can't reduce memory use below (\S+).*only reduced to (\S+)")
"""What XLA logs where making values again does not save enough memory; the program is made all the
same."""

MORE = 1.01
"""Times the FLOPs that the source asks for: a program of more has products made again. None that
is asked for is left uncounted, so the room is for what XLA adds, such as padding."""


@dataclass(frozen=True, repr=False)
class CompileReport(PrintedReport):
    """A compiled step, on one device.

    memory: bytes, as in `peak_memory`.
    fits: True if the peak is within the chip's usable memory and XLA has not said otherwise; None
      if unknown.
    sent: (kind, mesh axes, dtype) -> count and bytes of the program's collectives.
    contract: None if XLA chose the collectives.
    overlap: for the same keys, what runs between start and done; empty if the program has no
      schedule.
    flops: of matmuls that XLA sees. asked_flops: upper bound of those that the source asks for;
      None if not known. opaque: kernels that XLA does not see.
    attention, grouped_matmul: the kernels that layers run; None for a model without a description.
    roofline: seconds at the chip's peaks; opaque kernels count by their bytes alone.
    mfu_bound: the model's FLOPs, causal, over those the chip can do in that time, with the
      arithmetic of opaque kernels added; None for a model without a description.
    """

    checked: CheckReport
    memory: dict[str, int | None]
    fits: bool | None
    compile_s: float
    flops: float
    asked_flops: float | None
    opaque: dict[str, int]
    sent: dict[Key, tuple[int, float]]
    contract: Contract | None
    overlap: dict[Key, Tally]
    violations: tuple[str, ...]
    attention: tuple[str, ...] | None = None
    grouped_matmul: tuple[str, ...] | None = None
    roofline: Roofline = Roofline()  # noqa: RUF009 (frozen)
    mfu_bound: float | None = None

    @cached_property
    def work(self) -> Overhead | None:
        """FLOPs and bytes of a pipeline beyond those it needs; None without a pipeline."""
        return overhead(self.checked.assembly)

    def _hidden(self, key: Key) -> dict[str, float | None]:
        """Returns the bytes that the link can send during concurrent matmuls at the chip's peak,
        and the other bytes; None for a program without a schedule."""
        counts = self.overlap.get(key)
        if counts is None:
            return {"hidden_bytes": None, "exposed_bytes": None}
        return {
            "hidden_bytes": counts.hidden_bytes,
            "exposed_bytes": counts.exposed_bytes,
        }

    def table(self) -> str:
        """Returns a line for each collective of the program, with its prediction if any."""
        header = ["collective", "mesh axes", "dtype", "times", "bytes a device sends"]
        if self.contract is None:
            rows = [[*_cells(k), f"{n:,}", f"{b:,.0f}"] for k, (n, b) in sorted(self.sent.items())]
            return "\n".join(aligned([header, *rows], left=3))
        header += ["predicted", "bytes", ""]
        rows = [
            [
                *_cells(line.key),
                *(f"{line.compiled:,}", f"{line.compiled_bytes:,.0f}"),
                *(f"{line.predicted:,}", f"{line.predicted_bytes:,.0f}"),
                "kept" if line.kept else "BROKEN",
            ]
            for line in self.contract.lines
        ]
        handed = [
            f"BROKEN: {collective}" for collective in self.contract.handed if not collective.kept
        ]
        rewrites = [f"known: {words}" for words in self.contract.rewrites]
        return "\n".join([*aligned([header, *rows], left=3), *handed, *rewrites])

    def summary(self) -> str:
        """Returns memory, time and FLOPs of one device, overlap, and violations, as text."""
        memory = ", ".join(
            f"{name.removesuffix('_bytes')} {'?' if n is None else f'{n:,}'}"
            for name, n in self.memory.items()
        )
        fits = {True: "fits", False: "DOES NOT FIT", None: "unknown whether it fits"}[self.fits]
        lines = [
            self.checked.summary(),
            f"compiled in {self.compile_s:.1f} s; bytes per device: {memory}; a program may take "
            f"{self.checked.assembly.spec.usable_bytes:,.0f}: {fits}",
            f"matmul FLOPs of a device's step: {self.flops:,.0f}"
            + ("" if self.asked_flops is None else f"; asked for: {self.asked_flops:,.0f}"),
        ]
        if not self.checked.assembly.spec.simulated:
            clock = self.checked.assembly.spec.chip.clock_ghz
            lines.append(self.roofline.summary(self.mfu_bound, clock))
        if self.opaque:
            kernels = ", ".join(f"{name} x {n}" for name, n in self.opaque.items())
            lines.append(f"these seconds and FLOPs leave out the FLOPs of kernels: {kernels}")
        if on_host := self.memory["host_temp_bytes"]:
            lines.append(
                f"{on_host:,} bytes wait in the host's memory; their way there and back is not in "
                f"these seconds"
            )
        lines += [] if self.work is None else [self.work.summary()]
        if self.attention:
            lines.append(f"attention: {', '.join(self.attention)}")
        if (room := documents_room(self.checked.assembly)) is not None:
            lines.append(
                f"a device whose rows have more than {room} short documents in the mean runs "
                "attention as loops over tiles, which these seconds and FLOPs leave out"
            )
        if self.grouped_matmul:
            lines.append(f"experts: {', '.join(self.grouped_matmul)}")
        lines += [
            f"{' '.join(_cells(key))}: {counts.asynchronous:,} of {counts.count:,} asynchronous, "
            f"{counts.hidden:,} beside a matmul; {counts.exposed_bytes:,.0f} of "
            f"{counts.wire_bytes:,.0f} bytes are more than the link sends meanwhile"
            for key, counts in sorted(self.overlap.items())
            if counts.asynchronous
        ]
        if why := why_not_predicted(self.checked.assembly):
            lines.append(f"no contract: {why}")
        if codec := steady(self.checked.assembly).codec:
            lines.append(f"gradients are summed as in the last step, by {codec}")
        return "\n".join([*lines, *self.violations])

    def as_json(self) -> dict[str, Any]:
        """Returns keys for scripts to rely on; `pipeline_work` only on a mesh with stages."""
        parts = self.checked.bytes_per_device
        sizes = {"params": parts["params"], "optimizer": parts["optimizer"]}
        sizes |= {k: self.memory[f"{k}_bytes"] for k in ("temp", "host_temp", "peak")}
        sizes["scratch"] = self.memory.get("scratch_bytes", 0)
        sent: list[dict[str, Any]] = [
            {"kind": k.kind, "axes": k.axes, "dtype": k.dtype, "count": n, "bytes": b}
            | self._hidden(k)
            for k, (n, b) in sorted(self.sent.items())
        ]
        return {
            "fits": self.fits,
            "bytes_per_device": sizes,
            "usable_bytes": self.checked.assembly.spec.usable_bytes,
            "memory_fraction": memory_fraction(self.checked.assembly.spec),
            "collectives": sent,
            "contract": None if self.contract is None else not self.contract.broken,
            "attention": None if self.attention is None else list(self.attention),
            "documents_room": documents_room(self.checked.assembly),
            "grouped_matmul": None if self.grouped_matmul is None else list(self.grouped_matmul),
            "flops": self.flops,
            "asked_flops": self.asked_flops,
            "compile_s": self.compile_s,
            "kernels": self.roofline.kernels,
            "roofline_s": self.roofline.seconds,
            "compiler_cycles": self.roofline.cycles,
            "compiler_cycles_roofline_s": self.roofline.cycles_s,
            "mfu_bound": self.mfu_bound,
            "violations": list(self.violations),
            **({} if self.work is None else {"pipeline_work": self.work.as_json()}),
        }


def _cells(key: Key) -> list[str]:
    return [key.kind, " x ".join(key.axes), key.dtype]


def compile(
    experiment: Experiment | str | Path,
    mesh: MeshSpec | str | Path,
    *,
    compiler_log: CompilerLog | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> CompileReport:
    """Compiles the train step for a mesh, present or absent, and checks it against the contract.

    Absent TPUs and GPUs need their compiler's plugin and `mesh.absent.ENVIRONMENT`. compiler_log:
    None leaves the compiler's log unread. progress: called before work that takes minutes.

    The report's violations: a broken contract; collectives in branches that devices take
    differently; if simulated, collectives beside a loop of others; weights that XLA gathers
    completely; memory that XLA cannot save; products recomputed to save it. Raises ValueError with
    every violation that `check` finds but missing data, or if the compiler refuses mesh or memory.
    """
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    checked = check(experiment, mesh, data_here=False)
    assembly, spec = checked.assembly, checked.assembly.spec
    active, options = active_mesh(_mesh(spec), assembly.sizes), dict(spec.compiler_options)
    raise_violations(option_violations(options, active.devices.flat[0]), spec.where)
    started = time.perf_counter()
    progress(f"compiling for {spec.devices} {spec.chip.name}: minutes for a large model")
    splits = shardings(assembly.abstract, assembly.splits, active)
    traced = trace_step(assembly, active, splits, choice=steady(assembly))
    unsafe = branch_violations(
        traced.jaxpr if assembly.check_vma else _typed_jaxpr(assembly, active)
    )
    lowered = traced.lower()
    with (compiler_log or _no_log)() as log, _refused_by(spec):
        compiled = lowered.compile(compiler_options=assembly.compiler_options or None)
    elapsed, text = time.perf_counter() - started, program_text(compiled)
    operations, memory = collectives(text), with_scratch(peak_memory(compiled), text)
    stated = why_not_predicted(assembly) is None
    outcome = contract(assembly, lowered_collectives(lowered), operations) if stated else None
    peak, squeezed = memory["peak_bytes"], _memory_warnings(log())
    flops, expected = dot_flops(text), asked_flops(assembly)
    return CompileReport(
        checked=checked,
        memory=memory,
        fits=False if squeezed else None if peak is None else peak <= spec.usable_bytes,
        compile_s=elapsed,
        flops=flops,
        asked_flops=expected,
        opaque=opaque_kernels(text),
        sent=collective_totals(operations, assembly.sizes),
        contract=outcome,
        overlap=_overlap(text, assembly),
        violations=(
            *unsafe,
            *(side_by_side(text) if spec.simulated else ()),
            *(*_remat_warnings(log()), *squeezed, *_recomputed(flops, expected), *_broken(outcome)),
        ),
        attention=kernels_of(assembly, attentions),
        grouped_matmul=kernels_of(assembly, mixtures),
        roofline=(least := _roofline(text, assembly)),
        mfu_bound=_mfu_bound(assembly, least),
    )


def _roofline(text: str, assembly: Assembly) -> Roofline:
    return roofline(
        text,
        peak_flops=assembly.peak_flops,
        bandwidth_gbytes=assembly.spec.chip.hbm_bandwidth_gbytes,
        narrow_flops=assembly.product_flops,
    )


def _mfu_bound(assembly: Assembly, least: Roofline) -> float | None:
    if assembly.description is None or assembly.tokens is None:
        return None
    step_s = least.seconds + opaque_flops(assembly) / assembly.peak_flops
    return matmul_seconds(assembly) / step_s


def _overlap(text: str, assembly: Assembly) -> dict[Key, Tally]:
    """Returns overlap by key of `sent`. A collective of mixed dtypes counts for each of them. {}
    for a program without a schedule."""
    if "is_scheduled=true" not in text.partition("\n")[0]:
        return {}
    spans = overlaps(text, least_kernel_flops(assembly))
    parts = (replace(span, parts=(part,)) for span in spans for part in span.parts)
    several = [part for part in parts if part.parts[0].group_size > 1]
    rate = assembly.product_flops

    def key(span: Overlap) -> Key:
        return key_of(span.parts[0], assembly.sizes)

    def bytes_per_flop(span: Overlap) -> float:
        if assembly.spec.simulated or not assembly.spec.links:
            return math.inf
        return bytes_per_s(key(span).axes, assembly.spec) / rate

    return tally(several, key, bytes_per_flop)


def _mesh(spec: MeshSpec) -> jax.sharding.Mesh:
    """Returns a mesh of this machine's devices if they match; else of absent devices."""
    platform = "cpu" if spec.simulated else spec.chip.platform
    devices = jax.devices()
    if platform == "cpu" or (devices[0].platform == platform and len(devices) >= spec.devices):
        return make_mesh(spec)
    return absent_mesh(spec)


def _typed_jaxpr(assembly: Assembly, mesh: jax.sharding.Mesh) -> Any:
    """Traces the step with types of what varies over which mesh axis (`check_vma`).

    The types are off for Pallas kernels, which do not accept them. Portable kernels replace these
    here; neither kind sends anything.
    """
    e, portable = assembly.experiment, {"attention": Reference(), "grouped_matmul": BlockLoop()}
    execution = replace(e.execution, check_vma=True, **portable)
    typed = assemble(replace(e, execution=execution), assembly.spec, assembly.fields)
    splits = shardings(typed.abstract, typed.splits, mesh)
    return trace_step(typed, mesh, splits, choice=steady(typed)).jaxpr


def _no_log() -> AbstractContextManager[Callable[[], str]]:
    return nullcontext(lambda: "")


def _remat_warnings(log: str) -> list[str]:
    lines = [line.strip() for line in log.splitlines() if REMATERIALISED in line]
    return [f"XLA gathers a whole tensor to split it another way: {line}" for line in lines]


def _memory_warnings(log: str) -> list[str]:
    return [
        f"XLA can make the step no smaller than {match[2]}, and has {match[1]} for it: use more "
        f"microbatches or devices"
        for match in SQUEEZED.finditer(log)
    ]


def _recomputed(flops: float, expected: float | None) -> list[str]:
    if expected is None or flops <= MORE * expected:
        return []
    return [
        f"XLA recomputes {flops / expected - 1:.0%} more matmul FLOPs than the source asks for, to "
        f"squeeze the step in: {flops:,.0f} for {expected:,.0f}; use more microbatches, or "
        f"LayerLoop(remat='full') if that is not the one, whose price is known"
    ]


@contextmanager
def _refused_by(spec: MeshSpec) -> Iterator[None]:
    """Raises ValueError if TPUs' compiler refuses a program that does not fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        text = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
        raise ValueError(
            f"{spec.where}: the step does not fit a {spec.chip.name}: {text} Use more microbatches "
            f"or devices, or LayerLoop(remat='full')"
        ) from error


def _broken(outcome: Contract | None) -> list[str]:
    if outcome is None:
        return []
    return [f"the contract is broken: {line}" for line in outcome.broken]
