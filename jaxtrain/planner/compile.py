"""An experiment compiled for a mesh that is here or not: what its step would take and send."""

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
from jaxtrain.experiment import Experiment, load_experiment
from jaxtrain.mesh.absent import absent_mesh
from jaxtrain.mesh.compiler_options import option_violations
from jaxtrain.mesh.links import scope_of
from jaxtrain.mesh.memory_pool import memory_fraction
from jaxtrain.mesh.mesh import MeshSpec, make_mesh
from jaxtrain.models.description import AttentionCall, ExpertCall
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.planner.arithmetic import asked_flops, least_kernel_flops, opaque_flops
from jaxtrain.planner.assembled import steady, why_not_predicted
from jaxtrain.planner.contract import Contract, Key, collective_totals, contract, key_of
from jaxtrain.planner.overhead import Overhead, overhead
from jaxtrain.planner.seconds import matmul_seconds
from jaxtrain.run.check import CheckReport, check_anywhere
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.running_kernels import kernels_of
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import trace_step
from jaxtrain.telemetry.branches import branch_violations
from jaxtrain.telemetry.hlo.collectives import collectives, dot_flops, opaque_kernels, peak_memory
from jaxtrain.telemetry.hlo.order import side_by_side
from jaxtrain.telemetry.hlo.stablehlo import lowered_collectives
from jaxtrain.telemetry.hlo.text import program_text
from jaxtrain.telemetry.overlap import Overlap, Tally, overlaps, tally
from jaxtrain.telemetry.roofline import Roofline, roofline
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


@dataclass(frozen=True)
class CompileReport:
    """A compiled step, on one device.

    memory: bytes, as `peak_memory` has them. fits: whether the peak is within what a program may
    take of the chip, and XLA has not said otherwise; None where it is unknown. sent:
    what the program sends, by (kind, mesh axes, dtype): count and bytes. contract: None where XLA
    chose the collectives. overlap: of the same keys what stands between start and done, empty where
    the program has no schedule. flops: of matmuls XLA sees; asked_flops: of those the source asks
    for, at the most, None where that is not known; `opaque`: kernels XLA does not see. attention,
    grouped_matmul: the kernels that layers run, None of a model that says nothing of itself.
    roofline: seconds at the chip's peaks, opaque kernels by their bytes alone. mfu_bound: the
    model's FLOPs, causal, over what the chip could do in that time, with the arithmetic of opaque
    kernels added to it; None where the model says nothing of itself.
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
        """What a pipeline does over what it needs to; None without one."""
        return overhead(self.checked.assembly)

    def _hidden(self, key: Key) -> dict[str, float | None]:
        """Bytes that the link can send while matmuls run at the chip's peak beside them, and the
        others; None of a program without a schedule."""
        of = self.overlap.get(key)
        if of is None:
            return {"hidden_bytes": None, "exposed_bytes": None}
        return {"hidden_bytes": of.hidden_bytes, "exposed_bytes": of.exposed_bytes}

    def table(self) -> str:
        """What the program sends, each line with the prediction beside it where there is one."""
        header = ["collective", "mesh axes", "dtype", "times", "bytes a device sends"]
        if self.contract is None:
            rows = [[*_spelt(k), f"{n:,}", f"{b:,.0f}"] for k, (n, b) in sorted(self.sent.items())]
            return "\n".join(_columns([header, *rows]))
        header += ["predicted", "bytes", ""]
        rows = [
            [
                *_spelt(line.key),
                *(f"{line.compiled:,}", f"{line.compiled_bytes:,.0f}"),
                *(f"{line.predicted:,}", f"{line.predicted_bytes:,.0f}"),
                "kept" if line.kept else "BROKEN",
            ]
            for line in self.contract.lines
        ]
        handed = [f"BROKEN: {each}" for each in self.contract.handed if not each.kept]
        known = [f"known: {words}" for words in self.contract.rewrites]
        return "\n".join([*_columns([header, *rows]), *handed, *known])

    def summary(self) -> str:
        """Memory, time and FLOPs of one device; overlap; then what is wrong."""
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
            lines.append(
                f"{self.roofline.kernels:,} kernels, {self.roofline.seconds:.3g} s at the chip's "
                f"peaks, {self.roofline.memory_bound_s:.3g} s of it at its memory's"
                + ("" if self.mfu_bound is None else f": at most {self.mfu_bound:.0%} causal MFU")
            )
        if moved := self.memory["host_temp_bytes"]:
            lines.append(
                f"{moved:,} bytes wait in the host's memory; their way there and back is not in "
                f"these seconds"
            )
        lines += [] if self.work is None else [self.work.summary()]
        if self.attention:
            lines.append(f"attention: {', '.join(self.attention)}")
        if self.grouped_matmul:
            lines.append(f"experts: {', '.join(self.grouped_matmul)}")
        if self.opaque:
            kernels = ", ".join(f"{name} x {n}" for name, n in self.opaque.items())
            lines.append(f"kernels whose FLOPs are not in it: {kernels}")
        lines += [
            f"{' '.join(_spelt(key))}: {each.asynchronous:,} of {each.count:,} asynchronous, "
            f"{each.hidden:,} beside a matmul; {each.exposed_bytes:,.0f} of "
            f"{each.wire_bytes:,.0f} bytes are more than the link sends meanwhile"
            for key, each in sorted(self.overlap.items())
            if each.asynchronous
        ]
        if why := why_not_predicted(self.checked.assembly):
            lines.append(f"no contract: {why}")
        if codec := steady(self.checked.assembly).codec:
            lines.append(f"gradients are summed as in the last step, by {codec}")
        return "\n".join([*lines, *self.violations])

    def as_json(self) -> dict[str, Any]:
        """What scripts may rely on; `pipeline_work` is there only on a mesh with stages."""
        parts = self.checked.bytes_per_device
        sizes = {"params": parts["params"], "optimizer": parts["optimizer"]}
        sizes |= {k: self.memory[f"{k}_bytes"] for k in ("temp", "host_temp", "peak")}
        found: list[dict[str, Any]] = [
            {"kind": k.kind, "axes": k.axes, "dtype": k.dtype, "count": n, "bytes": b}
            | self._hidden(k)
            for k, (n, b) in sorted(self.sent.items())
        ]
        return {
            "fits": self.fits,
            "bytes_per_device": sizes,
            "usable_bytes": self.checked.assembly.spec.usable_bytes,
            "memory_fraction": memory_fraction(self.checked.assembly.spec),
            "collectives": found,
            "contract": None if self.contract is None else not self.contract.broken,
            "attention": None if self.attention is None else list(self.attention),
            "grouped_matmul": None if self.grouped_matmul is None else list(self.grouped_matmul),
            "flops": self.flops,
            "asked_flops": self.asked_flops,
            "compile_s": self.compile_s,
            "kernels": self.roofline.kernels,
            "roofline_s": self.roofline.seconds,
            "mfu_bound": self.mfu_bound,
            "violations": list(self.violations),
            **({} if self.work is None else {"pipeline_work": self.work.as_json()}),
        }


def _spelt(key: Key) -> list[str]:
    return [key.kind, " x ".join(key.axes), key.dtype]


def _columns(rows: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def compile_experiment(
    experiment: Experiment | str | Path,
    mesh: MeshSpec | str | Path,
    *,
    compiler_log: CompilerLog | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> CompileReport:
    """The train step compiled for a mesh, present or absent, and held to the contract.

    Absent TPUs and GPUs need their compiler's plugin and a process that has started with
    `mesh.absent.ENVIRONMENT`. Without a `compiler_log` what the compiler only logs is not seen.
    progress: is told a line before what takes minutes.

    violations: a broken contract, collectives in branches that devices take differently, or (if
    simulated) beside a loop of others, weights that XLA gathers whole, memory that it cannot save,
    products that it makes again to save it. Raises ValueError with every violation of experiment
    and mesh, where the mesh can neither be made nor compiled for, and where the compiler refuses
    so much memory.
    """
    if not isinstance(experiment, Experiment):
        experiment = load_experiment(experiment)
    checked = check_anywhere(experiment, mesh)
    assembly, spec = checked.assembly, checked.assembly.spec
    active, options = active_mesh(_mesh(spec), assembly.sizes), dict(spec.compiler_options)
    raise_violations(option_violations(options, active.devices.flat[0]), spec.where)
    began = time.perf_counter()
    progress(f"compiling for {spec.devices} {spec.chip.name}: minutes for a large model")
    where = shardings(assembly.abstract, assembly.splits, active)
    traced = trace_step(assembly, active, where, choice=steady(assembly))
    law = branch_violations(traced.jaxpr if assembly.check_vma else _typed_jaxpr(assembly, active))
    lowered = traced.lower()
    with (compiler_log or _unseen)() as log, _refused_by(spec):
        compiled = lowered.compile(compiler_options=assembly.compiler_options or None)
    elapsed, text = time.perf_counter() - began, program_text(compiled)
    found, memory = collectives(text), peak_memory(compiled)
    stated = why_not_predicted(assembly) is None
    held = contract(assembly, lowered_collectives(lowered), found) if stated else None
    peak, squeezed = memory["peak_bytes"], _memory_warnings(log())
    flops, asked = dot_flops(text), asked_flops(assembly)
    return CompileReport(
        checked=checked,
        memory=memory,
        fits=False if squeezed else None if peak is None else peak <= spec.usable_bytes,
        compile_s=elapsed,
        flops=flops,
        asked_flops=asked,
        opaque=opaque_kernels(text),
        sent=collective_totals(found, assembly.sizes),
        contract=held,
        overlap=_overlap(text, assembly),
        violations=(
            *law,
            *(side_by_side(text) if spec.simulated else ()),
            *(*_remat_warnings(log()), *squeezed, *_made_again(flops, asked), *_broken(held)),
        ),
        attention=kernels_of(assembly, AttentionCall),
        grouped_matmul=kernels_of(assembly, ExpertCall),
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
    """Of each key of `sent`, what mixes dtypes with each; nothing of an unscheduled program."""
    if "is_scheduled=true" not in text.partition("\n")[0]:
        return {}
    found = overlaps(text, least_kernel_flops(assembly))
    parts = (replace(each, parts=(part,)) for each in found for part in each.parts)
    several = [part for part in parts if part.parts[0].group_size > 1]
    links, rate = dict(assembly.spec.links), assembly.product_flops

    def key(each: Overlap) -> Key:
        return key_of(each.parts[0], assembly.sizes)

    def bytes_per_flop(each: Overlap) -> float:
        if assembly.spec.simulated or not links:
            return math.inf
        return links[scope_of(key(each).axes, assembly.spec)].bandwidth_gbytes * 1e9 / rate

    return tally(several, key, bytes_per_flop)


def _mesh(spec: MeshSpec) -> jax.sharding.Mesh:
    """Of this machine's devices if they are those; else of absent ones."""
    platform = "cpu" if spec.simulated else spec.chip.platform
    here = jax.devices()
    if platform == "cpu" or (here[0].platform == platform and len(here) >= spec.devices):
        return make_mesh(spec)
    return absent_mesh(spec)


def _typed_jaxpr(assembly: Assembly, mesh: jax.sharding.Mesh) -> Any:
    """The step traced with types of what varies over which mesh axis. Pallas kernels, for whose
    sake they are off, refuse them: portable ones stand in, which send nothing either."""
    e, portable = assembly.experiment, {"attention": Reference(), "grouped_matmul": BlockLoop()}
    execution = replace(e.execution, check_vma=True, **portable)
    typed = assemble(replace(e, execution=execution), assembly.spec, assembly.fields)
    where = shardings(typed.abstract, typed.splits, mesh)
    return trace_step(typed, mesh, where, choice=steady(typed)).jaxpr


def _unseen() -> AbstractContextManager[Callable[[], str]]:
    return nullcontext(lambda: "")


def _remat_warnings(log: str) -> list[str]:
    lines = [line.strip() for line in log.splitlines() if REMATERIALISED in line]
    return [f"XLA gathers a whole tensor to split it another way: {line}" for line in lines]


def _memory_warnings(log: str) -> list[str]:
    return [
        f"XLA can make the step no smaller than {found[2]}, and has {found[1]} for it: use more "
        f"microbatches or devices"
        for found in SQUEEZED.finditer(log)
    ]


def _made_again(flops: float, asked: float | None) -> list[str]:
    if asked is None or flops <= MORE * asked:
        return []
    return [
        f"XLA recomputes {flops / asked - 1:.0%} more matmul FLOPs than the source asks for, to "
        f"squeeze the step in: {flops:,.0f} for {asked:,.0f}; use more microbatches, or "
        f"LayerLoop(remat='full') if that is not the one, whose price is known"
    ]


@contextmanager
def _refused_by(spec: MeshSpec) -> Iterator[None]:
    """TPUs' compiler makes no program that does not fit."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        told = str(error).splitlines()[0].removeprefix("RESOURCE_EXHAUSTED: ")
        raise ValueError(
            f"{spec.where}: the step does not fit a {spec.chip.name}: {told} Use more microbatches "
            f"or devices, or LayerLoop(remat='full')"
        ) from error


def _broken(held: Contract | None) -> list[str]:
    if held is None:
        return []
    return [f"the contract is broken: {line}" for line in held.broken]
