"""`experiments/llama3_1b.py` on synthetic packed documents: the largest batch that fits by the
compiler's memory estimate, the step's time there, and the effect of each option."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.bench_gpu.documents import SyntheticDocuments, lengths
from jaxtrain.bench_gpu.parts import FLAGS, MODEL
from jaxtrain.bench_gpu.setting import Row, Setting, Skipped
from jaxtrain.bench_gpu.timing import ROUNDS, summary
from jaxtrain.experiment import Experiment, load_experiment
from jaxtrain.mesh.compiler_options import option_violations
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.optim.precision import Precision, fp8, int8
from jaxtrain.program.collectives import dot_flops, peak_memory
from jaxtrain.program.roofline import roofline
from jaxtrain.program.text import program_text
from jaxtrain.quantization.delayed import Delayed
from jaxtrain.quantization.recipe import Fp8Products
from jaxtrain.session.first_state import initialise
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.state import TrainState, shardings
from jaxtrain.step.train_step import compile_step
from jaxtrain.telemetry.flops import mfu

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "llama3_1b.py"
REMAT = "dots_and_attention"
"""The default on accelerators."""
WARMUP = 3
ROOM = 0.97
"""Of the bytes that the device gives a process: products that are tuned need some too."""
QUICK = {"xla_gpu_autotune_level": 0}
"""Of XLA:GPU, for programs that are read and not run: no kernels are timed to choose one."""
MORE = 1.01
"""Times the FLOPs of as many rows by themselves: a program of more makes products again, because it
would not fit otherwise."""


PRECISIONS = {
    "fp8": fp8,
    "fp8_delayed": replace(fp8, products=Fp8Products(Delayed())),
    "int8": int8,
}


class Need(NamedTuple):
    """Peak bytes of a compiled step, and FLOPs of its products."""

    peak: int
    flops: float


@dataclass(frozen=True)
class Variant:
    """Options of the step. batch: rows a step, in one microbatch. unroll: layers are unrolled, None
    for the platform's choice. precision: None for the experiment's. chunk_tokens: None for the
    model's own. options: of the compiler."""

    batch: int
    remat: str = REMAT
    unroll: bool | None = None
    precision: Precision | None = None
    chunk_tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Compiled:
    """A variant compiled for the device of the setting."""

    setting: Setting
    variant: Variant

    def __post_init__(self) -> None:
        self.assembly = assembled(self.setting, self.variant)
        spec = self.assembly.spec
        self.mesh = active_mesh(make_mesh(spec), self.assembly.sizes)
        device = self.mesh.devices.flat[0]
        if refused := option_violations(dict(self.variant.options), device):
            raise Skipped("; ".join(refused))
        a, began = self.assembly, time.perf_counter()
        self.shardings: TrainState = shardings(a.abstract, a.splits, self.mesh)
        self.program = compile_step(a, self.mesh, self.shardings)
        self.compile_s = time.perf_counter() - began

    @cached_property
    def text(self) -> str:
        return program_text(self.program)

    @cached_property
    def need(self) -> Need:
        peak = peak_memory(self.program)["peak_bytes"]
        assert peak is not None, "XLA tells it on CPU, GPU and TPU"
        return Need(peak, dot_flops(self.text))

    def row(self) -> Row:
        """Returns the batch, what the program needs, and its kernels' seconds at the chip's peaks,
        which leave out kernels that XLA does not see into: those of attention."""
        v, a = self.variant, self.assembly
        kernels = roofline(
            self.text,
            peak_flops=a.peak_flops,
            narrow_flops=a.product_flops,
            bandwidth_gbytes=a.spec.chip.hbm_bandwidth_gbytes,
        )
        return {
            "batch": v.batch,
            "remat": v.remat,
            "compile_s": self.compile_s,
            "program_gb": self.need.peak / 1e9,
            "peaks_s": kernels.seconds,
        }

    def train(self) -> Row:
        """Returns the speed, memory and losses of a training that repeats one batch. A round
        dispatches all its steps before it waits; if steps are long a round has fewer, so that the
        part ends in time."""
        a, e = self.assembly, self.assembly.experiment
        state, steps = initialise(a, self.shardings), self.setting.sizes.steps
        round_s = self.setting.sizes.longest_round_s
        rows = e.data.open("train", seed=e.seed, cache_dir=Path())
        read = np.arange(self.variant.batch)
        placed = a.placed(rows, self.mesh, e.microbatches)
        batch, losses, rounds = placed.rows(read), [], []
        for timed in (*[False] * WARMUP, *[True] * ROUNDS):
            began, metrics = time.perf_counter(), {}
            for _ in range(steps if timed else 1):
                state, metrics = self.program(state, batch)
            losses.append(float(metrics["loss"]))
            took = time.perf_counter() - began
            if timed:
                rounds.append(took / steps)
            else:
                steps = min(self.setting.sizes.steps, max(1, int(round_s / took)))
        step = summary(rounds)
        documents = lengths(rows.rows(read)["positions"])
        flops = e.model.flops(seq=e.data.seq, sequences=len(read), documents=documents)
        peak = {"peak_flops_per_device": a.peak_flops, "devices": 1, "step_s": step.seconds}
        return {
            "step_s": step.seconds,
            "spread": step.spread,
            "tokens_per_s": len(read) * e.data.seq / step.seconds,
            "mfu_causal": mfu(flops.train_causal, **peak),
            "mfu_full": mfu(flops.train_full, **peak),
            "peak_gb": held_bytes() / 1e9,
            "first_loss": losses[0],
            "loss": losses[-1],
        }


def measure(setting: Setting, row: str, variant: Variant, **options: str) -> None:
    """Reports what a variant's program needs, then its steps: a program that hangs has told."""
    compiled = Compiled(setting, variant)
    setting.tell({"row": row, **compiled.row(), **options})
    setting.tell({"row": row, "batch": variant.batch, **compiled.train()})


def held_bytes() -> int:
    """Returns the peak bytes of the device, 0 where they are not counted."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def assembled(setting: Setting, variant: Variant) -> Assembly:
    """Returns the experiment on the setting's device. The loop over layers is the platform's own
    but for what the variant says of it."""
    options = dict(setting.spec.compiler_options) | dict(variant.options)
    spec = replace(setting.spec, compiler_options=tuple(options.items()))
    a = assemble(experiment(setting, variant), spec)
    unroll = a.loop.unroll if variant.unroll is None else variant.unroll
    return replace(a, loop=replace(a.loop, remat=variant.remat, unroll=unroll))


def experiment(setting: Setting, variant: Variant) -> Experiment:
    """Returns the experiment on synthetic documents, in one microbatch, with training steps
    only."""
    if not EXPERIMENT.is_file():
        raise Skipped(f"there is no {EXPERIMENT}; run from a checkout of jaxtrain")
    e = load_experiment(EXPERIMENT)
    model, seq = e.model, e.data.seq
    if setting.sizes.shrunk:
        # Drawn as the large one is: the first loss is held against the vocabulary's.
        small = replace(model.shrunk(1), vocab=256, vocab_multiple=64, init=model.init)
        model, seq = small, 32
    if variant.chunk_tokens is not None:
        model = replace(model, chunk_tokens=variant.chunk_tokens)
    return replace(
        e,
        model=model,
        data=SyntheticDocuments(model.vocab, seq, setting.sizes.mean),
        batch=variant.batch,
        microbatches=1,
        precision=variant.precision or e.precision,
        evaluation=None,
        checkpoints=None,
    )


def usable_bytes(setting: Setting) -> int:
    """Returns the bytes of the device that a program may use."""
    if setting.sizes.usable is not None:
        return setting.sizes.usable
    stats = jax.local_devices()[0].memory_stats() or {}
    return round(ROOM * stats.get("bytes_limit", setting.spec.usable_bytes))


def largest_batch(need: Callable[[int], Need], usable: int, most: int) -> int:
    """Returns the largest batch up to `most` whose program fits without recomputation, to a
    sixteenth; 0 where one row does not fit.

    Memory grows by the same bytes with each row, so two programs predict the batch. If the program
    there does not fit, bisects.
    """
    first, second = need(1), need(2)

    def fits(batch: int) -> bool:
        needed = need(batch)
        return needed.peak <= usable and needed.flops <= MORE * batch * first.flops

    if first.peak > usable:
        return 0
    low, high = 1, min(most, 1 + (usable - first.peak) // max(1, second.peak - first.peak))
    if fits(high):
        return high
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def search(setting: Setting, remat: str) -> Variant:
    """Returns the variant with the policy `remat` and its largest batch, as `largest_batch` finds
    it. Raises Skipped if one row does not fit."""
    usable, on_gpu = usable_bytes(setting), setting.platform == "gpu"
    options = QUICK if on_gpu and not option_violations(QUICK, jax.devices()[0]) else {}

    @cache
    def need(batch: int) -> Need:
        return Compiled(setting, Variant(batch, remat, options=options)).need

    batch = largest_batch(need, usable, setting.sizes.most)
    if batch == 0:
        raise Skipped(f"one row takes {need(1).peak:,} bytes, and a program may take {usable:,}")
    return Variant(batch, remat)


def step(setting: Setting, case: str) -> None:
    """Measures the default: the largest `batch`, the time there, and at half of it."""
    if case == "batch":
        variant, usable = search(setting, REMAT), usable_bytes(setting) / 1e9
        setting.tell({"row": "largest batch", "batch": variant.batch, "usable_gb": usable})
        return
    largest = setting.rows(f"{MODEL}/batch")[-1]["batch"]
    batch = largest if case == "largest" else max(1, largest // 2)
    measure(setting, f"jaxtrain, {case}", Variant(batch))


def best_batch(setting: Setting) -> int:
    """Returns the batch of the most tokens a second. Raises Skipped where none was timed."""
    parts = [f"{MODEL}/{case}" for case in ("largest", "half")]
    rows = [row for part in parts for row in setting.earlier.get(part, []) if "loss" in row]
    if not rows:
        raise Skipped(f"needs what {' or '.join(parts)} finds, which found nothing")
    return max(rows, key=lambda row: row["tokens_per_s"])["batch"]


def again(setting: Setting, turn: str) -> None:
    """Measures the default at its best batch again, alternating with torch. turn: names the row."""
    measure(setting, f"jaxtrain, turn {turn}", Variant(best_batch(setting)))


def precision(setting: Setting, name: str) -> None:
    """Measures products in 8 bits at the best batch of the default."""
    measure(setting, name, Variant(best_batch(setting), precision=PRECISIONS[name]))


def other_remat(setting: Setting, remat: str) -> None:
    """Measures a remat policy at its own largest batch."""
    measure(setting, f"remat {remat}", search(setting, remat))


def scanned(setting: Setting, _: str) -> None:
    """Measures a loop over layers that is not unrolled."""
    measure(setting, "scanned", Variant(best_batch(setting), unroll=False))


def chunk(setting: Setting, tokens: str) -> None:
    """Measures the head in chunks of `tokens`."""
    variant = Variant(best_batch(setting), chunk_tokens=int(tokens))
    measure(setting, f"chunks of {tokens} tokens", variant)


def flag(setting: Setting, name: str) -> None:
    """Measures the step with options of the compiler."""
    options = FLAGS[name]
    shown = ", ".join(f"{option}={value}" for option, value in options.items())
    measure(setting, name, Variant(best_batch(setting), options=options), options=shown)
