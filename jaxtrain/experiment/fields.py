"""Fields of an experiment. They hold values, not names of values, and do not depend on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optax

from jaxtrain.checkpoint.policy import SavePolicy
from jaxtrain.collectives.buckets import SMALL_LEAF
from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.compression.reducer import Reducer
from jaxtrain.context.choice import Method
from jaxtrain.data import BatchRamp
from jaxtrain.experiment.evaluation import Evaluation, Sample
from jaxtrain.experiment.fine_tuning import FineTuning, LoRA, Start
from jaxtrain.experiment.kinds import callback_violations, kind_violations, makes_value
from jaxtrain.losses.preferences import DPO
from jaxtrain.mesh.sharding import ShardingRules, fsdp, tensor
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.plain import Optax
from jaxtrain.optim.precision import Precision, fp32
from jaxtrain.pipeline.config import Pipeline
from jaxtrain.reprs import short_repr
from jaxtrain.telemetry.profiler import Steps
from jaxtrain.violations import at_least, count, positive, raise_violations

SEEDS = 2**32
"""Seeds of JAX's keys. A larger seed would draw the same numbers as a smaller one."""


MOST_CHECKED = 32
"""Most steps of a self-check; their batches are in memory together."""


@dataclass(frozen=True)
class LossSpikes:
    """Rollback after a loss spike: the run returns to a save from before it and continues with
    other batches. PaLM (Chowdhery et al. 2022, section 5.1) went back about 100 steps and skipped
    200 to 500 batches.

    above: a loss is high if it exceeds the median of earlier losses by this many times their scale.
      The scale is 1.4826 times their median absolute deviation, the standard deviation of normal
      numbers (Hampel 1974).
    least: smallest excess over the median of a high loss, in the loss's unit (nats).
    window: number of recent losses that were not high; with fewer, no loss is judged.
    patience: this many high losses in a row are a spike. Nothing is saved meanwhile.
    back: least steps between the save that is restored and the first high loss. If no save is as
      old, the oldest from before the spike is restored; without one, the run's initial state.
    skip_more: the batches taken since that save are skipped, and this many after them.
    most: spikes that are acted on in a run; later ones are reported, and the run continues.

    A loss that is not finite does not count: its step is skipped.
    """

    above: float = 10.0
    least: float = 0.1
    window: int = 128
    patience: int = 3
    back: int = 100
    skip_more: int = 100
    most: int = 10

    def __post_init__(self) -> None:
        violations = positive("above", self.above) + at_least("least", self.least, 0)
        for name, fewest in (("window", 2), ("patience", 1), ("back", 0), ("skip_more", 0)):
            violations += count(name, getattr(self, name), fewest)
        raise_violations(violations + count("most", self.most, 1), "LossSpikes")


@dataclass(frozen=True)
class Health:
    """Checks of a run's numbers. If a device computes or stores wrong numbers, the run ends without
    a save of that state; the newest checkpoint continues (see `jaxtrain launch`). None disables a
    check.

    replicas: steps between comparisons, bit for bit, of the copies of the same part of the state on
      several devices; they are also compared before each save. Devices that differ from most of
      three or more are named; of two, both are.
    replay: steps between replays. A replay takes one step twice from the same state and batch; both
      must be equal to the bit. A copy of the state is in memory meanwhile.
    self_check: this many first steps of a start, 32 at most, are taken twice before it: as
      configured, and in a safe configuration (XLA's own collectives, the plain kernels, no
      rematerialisation, no compiler options of the mesh). Losses and gradient norms must agree
      within 1e-5, in 16 bits 3e-2; otherwise the run is refused before anything is saved. A copy of
      the state and the batches are in memory meanwhile, and the safe step has the larger
      activations.
    kernels: True: before the first step of a start the fused kernels of attention and of experts'
      products are compared with the portable ones, output and gradients, head by head and expert by
      expert. A run with a wrong one is refused. None: on accelerators, but for an attention kernel
      of your own that is not declared standard.
    spikes: reaction to a loss spike, None for none. With `replay`, the same batches are taken once
      more first, and skipped if the spike occurs again.
    skip_batches: pairs (steps, batches), ascending: after that many steps, that many batches of the
      data are skipped. Steps keep their numbers, and schedules with them. A start may neither add
      pairs that lie before it nor drop those it has passed; each save has what was skipped.
    """

    replicas: int | None = None
    replay: int | None = None
    self_check: int | None = None
    kernels: bool | None = None
    spikes: LossSpikes | None = None
    skip_batches: tuple[tuple[int, int], ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        intervals = {
            "replicas": self.replicas,
            "replay": self.replay,
            "self_check": self.self_check,
        }
        violations = [v for k, n in intervals.items() if n is not None for v in count(k, n, 1)]
        if not violations and (self.self_check or 0) > MOST_CHECKED:
            violations = [
                f"self_check={self.self_check} steps are more than rounding allows to compare; use "
                f"{MOST_CHECKED} or fewer, such as 3"
            ]
        violations += [v for v in kind_violations(self) if v.startswith(("spikes=", "kernels="))]
        raise_violations(violations + _skip_violations(self.skip_batches))


def _skip_violations(value: Any) -> list[str]:
    pairs = isinstance(value, tuple) and all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and not count("steps", pair[0], 0)
        and not count("batches", pair[1], 1)
        for pair in value
    )
    if pairs and list(value) == sorted(set(value)):
        return []
    return [
        f"skip_batches={value!r} must be pairs (steps done, batches skipped), ascending; use for "
        "example skip_batches=((900, 300),)"
    ]


@dataclass(frozen=True)
class Execution:
    """Settings of how a step runs. They do not change its mathematics. None lets the platform
    decide.

    mode: "explicit" (our collectives, one shard_map), "gspmd" (XLA's), None: explicit for models
      that describe themselves, gspmd for others.
    loop: how the loop over layers runs (unrolled, remat, prefetch); None: `loop_on`.
    attention: an attention kernel of `jaxtrain.attention`; None is the platform's own.
    grouped_matmul: the multiplication of experts' rows, of `jaxtrain.moe`; None is the platform's
      own.
    collectives: algorithms of the explicit step (`Lax`, `Ring`, `Recursive`), by the data they
      move.
    check_vma: JAX's types of what varies over which mesh axis, which detect a forgotten reduction;
      False only if a library kernel refuses it.
    reducer: sums gradients over the mesh axes on which a leaf is replicated, in the explicit step:
      `data`, and `fsdp` if it does not split the leaf. Axes that split it are reduce-scattered, by
      `collectives`. `Rounded` sends sums in bfloat16. `Compressed` changes the result of training a
      little, and a resumed run keeps it.
    small_leaf: gradients of leaves with up to this many elements (a device's part) are summed,
      scattered and, with ZeRO-1 and 2, gathered together; leaves with up to this many elements in
      total are not compressed.
    reduce_layers: sum the gradients of each layer within the backward pass, concurrent with the
      layer below, and not once a step after it; `small_leaf` then counts in a layer. Each
      microbatch sends these sums: `microbatches` times as many bytes. Leaves that are not stacked
      over layers, or are first scattered once a step (ZeRO), are still summed at the end.
    pipeline: the schedule of a mesh's `stage` axis.
    context: a method of `jaxtrain.context` for attention over rows that a mesh's `context` axis
      splits, in the explicit step; None is the one that suits mesh and heads.
    expert_chunk: tokens of a device that go to their experts at one time, None for all of them.
      Less memory for sent rows, which are sent again in the backward pass. With `Padded(Ring())`
      rows of a chunk travel during products of the chunks before and after.
    health: checks of what devices compute and store, and the reaction to spikes of the loss, which
      changes what is learned; a resumed run may change it.
    """

    mode: str | None = None
    loop: LayerLoop | None = None
    attention: Any = None
    grouped_matmul: Any = None
    collectives: Collectives | None = None
    check_vma: bool | None = None
    reducer: Reducer = Lax()  # noqa: RUF009 (frozen)
    small_leaf: int = SMALL_LEAF
    reduce_layers: bool = False
    pipeline: Pipeline = Pipeline()  # noqa: RUF009 (frozen)
    health: Health = Health()
    context: Method | None = None
    expert_chunk: int | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        violations = count("small_leaf", self.small_leaf, 0)
        if self.expert_chunk is not None:
            violations += count("expert_chunk", self.expert_chunk)
        raise_violations(kind_violations(self) or violations)

    def loop_on(self, platform: str, fetches: bool) -> LayerLoop:
        """Returns the loop over layers. By default it is unrolled on CPUs, and on GPUs if layers
        fetch no weights: then a scanned one has nothing to hide, and copies residuals to stacks
        and back."""
        if self.loop is not None:
            return self.loop
        if platform == "cpu":
            return LayerLoop(unroll=True, remat="none")
        return LayerLoop(unroll=platform == "gpu" and not fetches, remat="dots_and_attention")


def seed_violations(seed: int) -> list[str]:
    if isinstance(seed, int) and 0 <= seed < SEEDS:
        return []
    return [f"seed={seed!r} must lie in [0, 2**32); use for example seed=0"]


@dataclass(frozen=True)
class Logging:
    """every: steps between logged lines, whose speeds are means since the previous line. profile:
    steps to trace.
    tensorboard: write events; None: if tensorboardX is installed. True without tensorboardX is
      refused.
    callbacks: your own code that a run calls: frozen dataclasses that inherit from `Callback`, or
      functions (or classes) at the top of a module that each start calls without arguments to make
      one. A resumed run may have others.
    """

    every: int = 10
    profile: Steps | None = None
    tensorboard: bool | None = None
    callbacks: tuple[Any, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        violations = kind_violations(self)
        if isinstance(self.callbacks, tuple):
            violations += callback_violations("callbacks", self.callbacks)
        if isinstance(self.every, int) and self.every < 1:
            violations += count("every", self.every, 1)
        raise_violations(violations)


def _optimizer(optimizer: Any) -> Any:
    """Wraps an optax transformation, or a function that returns one, in `Optax`."""
    if isinstance(optimizer, optax.GradientTransformation):
        return Optax(optimizer)
    is_factory = (
        not isinstance(optimizer, type)
        and not hasattr(optimizer, "build")
        and makes_value(optimizer)
    )
    return Optax(optimizer) if is_factory else optimizer


@dataclass(frozen=True)
class Experiment:
    """One training run, on any mesh.

    model: a config with `build`, or a module-level function rngs -> nnx.Module whose `loss(batch,
      *, key)` returns (sum, count) and, optionally, a dict of other sums.
    data: a value with `open(split, *, seed, cache_dir)`, such as `TextData`.
    optimizer: such as `AdamW(3e-4)`; or an optax transformation, or a function that returns one,
      either of which is stored as an `Optax`.
    steps: of the complete run; schedules end there.
    batch: sequences a step, or a `BatchRamp`.
    microbatches: parts over which a batch is accumulated.
    seed: of initial weights, dropout and the order of the data.
    precision: the dtypes.
    sharding: how tensors are split over mesh axes.
    clip_norm: bound of the global gradient norm, None for none.
    ema_decay: of averaged weights, None for none. The average takes min(ema_decay, (1 + step) /
      (10 + step)): a young one forgets its start sooner. Only evaluation and sample use it.
    execution: how the step is run.
    evaluation: when the held-out loss is computed, None for never.
    checkpoints: when the run is saved and what is kept, None for never.
    logging: how often metrics are written, and where.
    fine_tuning: initial weights, and which parameters are trained; None trains all of them from
      their initialisation.

    Raises ValueError that lists every field of the wrong kind, with a remedy. `check` and `train`
    report what depends on other fields or on a mesh.
    """

    model: Any
    data: Any
    optimizer: Any
    steps: int
    batch: int | BatchRamp
    microbatches: int = 1
    seed: int = 0
    precision: Precision = fp32
    sharding: ShardingRules = fsdp() | tensor()
    clip_norm: float | None = 1.0
    ema_decay: float | None = None
    execution: Execution = Execution()
    evaluation: Evaluation | None = Evaluation()  # noqa: RUF009 (frozen)
    checkpoints: SavePolicy | None = SavePolicy()  # noqa: RUF009 (frozen)
    logging: Logging = Logging()
    fine_tuning: FineTuning | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        violations = kind_violations(self)
        object.__setattr__(self, "optimizer", _optimizer(self.optimizer))
        for name, method in (("data", "open"), ("optimizer", "build")):
            value = getattr(self, name)
            if isinstance(value, type) or not callable(getattr(value, method, None)):
                example = {"data": "TextData()", "optimizer": "AdamW(3e-4)"}[name]
                call = "call it, or " if callable(value) and not isinstance(value, type) else ""
                violations.append(
                    f"{name}={value!r} has no {method}; "
                    f"{call}use a value such as jaxtrain.{example}"
                )
        if isinstance(self.seed, int):
            violations += seed_violations(self.seed)
        raise_violations(violations)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Every size of the batch, in order."""
        return self.batch.sizes if isinstance(self.batch, BatchRamp) else (self.batch,)

    @property
    def start(self) -> Start | None:
        """The weights to begin with; None if the run initializes all."""
        return None if self.fine_tuning is None else self.fine_tuning.start

    @property
    def lora(self) -> LoRA | None:
        """The adapters to train; None without."""
        return None if self.fine_tuning is None else self.fine_tuning.lora

    @property
    def objective(self) -> DPO | None:
        """The loss of pairs that is trained; None: each token's."""
        return None if self.fine_tuning is None else self.fine_tuning.preferences

    @property
    def sample(self) -> Sample | None:
        """The sample at the end of the run; None if there is none."""
        return None if self.evaluation is None else self.evaluation.sample
