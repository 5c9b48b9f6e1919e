"""What an experiment says. Values, not names of values; nothing here depends on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import optax

from jaxtrain.checkpoint.policy import SavePolicy
from jaxtrain.collectives.buckets import SMALL_LEAF
from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.reducer import Reducer
from jaxtrain.context.choice import Method
from jaxtrain.data import BatchRamp
from jaxtrain.experiment.fine_tuning import FineTuning
from jaxtrain.experiment.kinds import callback_violations, kind_violations, makes_value
from jaxtrain.mesh.sharding import ShardingRules, fsdp, tensor
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.plain import Optax
from jaxtrain.optim.precision import Precision, fp32
from jaxtrain.pipeline.config import Pipeline
from jaxtrain.telemetry.profiler import Steps
from jaxtrain.violations import at_least, count, positive, raise_violations

SEEDS = 2**32
"""JAX's keys take so many: a seed beyond would draw what a smaller one draws."""


MOST_CHECKED = 32
"""Steps of a self-check; their batches are held at once."""


@dataclass(frozen=True)
class LossSpikes:
    """A loss that jumps, and stays up: the run goes back to a save from before it and takes other
    batches from there on. PaLM (Chowdhery et al. 2022, section 5.1) went back 100 steps or so, and
    passed over 200 to 500 batches.

    above: a loss is high that is so many times the scale of the losses before it above their
      median. The scale is 1.4826 times their median absolute deviation, the standard deviation of
      numbers that are normal (Hampel 1974).
    least: and so much above the median, in the loss's unit (nats).
    window: how many losses that were not high are held, the newest; fewer are judged by none.
    patience: so many high losses in a row are a spike. Nothing is saved meanwhile.
    back: steps, at least, between the save that is gone back to and the first high loss; where no
      save is as old, it is the oldest from before the spike, and where there is none at all the
      state that the run began with.
    skip_more: the batches taken since that save are skipped, and so many after them.
    most: spikes that are acted on in a run; later ones are told, and the run goes on.

    A loss that is not finite is none: its step is skipped.
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
    """Whether the numbers of a run are what they should be. What a device computes or keeps
    wrongly ends the run without a save of that state; the newest checkpoint goes on (see `jaxtrain
    launch`).

    replicas: every so many steps, and before each save, copies of the same part of the state on
    several devices are compared, bit for bit; those with most of three or more against them are
    named, of two both. replay: every so many steps one is taken twice from the same state and
    batch, and must come out the same to the bit; a copy of the state is held meanwhile. self_check:
    so many first steps of a start, 32 at most, are taken before it, twice: as they will be, and in
    a safe configuration (XLA's own collectives, the plain kernels, no rematerialisation, no
    compiler options of the mesh). Losses and gradient norms must agree within 1e-5, in 16 bits
    3e-2, or the run is refused before anything of it is saved. A copy of the state and the batches
    are held meanwhile, and the safe step has the larger activations. None is never.

    spikes: what is done about a loss that jumps, None for nothing. With `replay`, the same batches
    are taken once more first, and skipped where the spike comes again.
    skip_batches: pairs (steps, batches), ascending: after so many steps so many batches of the data
    are passed over. Steps keep their numbers, and schedules with them. A start may add pairs that
    lie before it no more than it may drop those it has passed; what was skipped is in each save.
    """

    replicas: int | None = None
    replay: int | None = None
    self_check: int | None = None
    spikes: LossSpikes | None = None
    skip_batches: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        given = {"replicas": self.replicas, "replay": self.replay, "self_check": self.self_check}
        found = [v for k, n in given.items() if n is not None for v in count(k, n, 1)]
        if not found and (self.self_check or 0) > MOST_CHECKED:
            found = [
                f"self_check={self.self_check} steps are more than rounding allows to compare; use "
                f"{MOST_CHECKED} or fewer, such as 3"
            ]
        found += [v for v in kind_violations(self) if v.startswith("spikes=")]
        raise_violations(found + _skip_violations(self.skip_batches))


def _skip_violations(given: Any) -> list[str]:
    pairs = isinstance(given, tuple) and all(
        isinstance(each, tuple)
        and len(each) == 2
        and not count("steps", each[0], 0)
        and not count("batches", each[1], 1)
        for each in given
    )
    if pairs and list(given) == sorted(set(given)):
        return []
    return [
        f"skip_batches={given!r} must be pairs (steps done, batches skipped), ascending; use for "
        "example skip_batches=((900, 300),)"
    ]


@dataclass(frozen=True)
class Execution:
    """How the same mathematics is run. None lets the platform decide.

    mode: "explicit" (our collectives, one shard_map), "gspmd" (XLA's), None: explicit for
      models that describe themselves, gspmd for others.
    loop: how the loop over layers runs (unrolled, remat, prefetch).
    attention: an attention kernel of `jaxtrain.attention`; None is the platform's own.
    grouped_matmul: what multiplies experts' rows, of `jaxtrain.moe`; None is the platform's own.
    collectives: algorithms of the explicit step (`Lax`, `Ring`, `Recursive`) by what they move.
    check_vma: JAX's types of what varies over which mesh axis, a proof against a forgotten
      reduction; False only where a library kernel refuses it.
    reducer: what sums gradients over the mesh axes on which a leaf is whole, in the explicit step:
      `data`, and `fsdp` where it splits nothing of the leaf. What it splits is reduce-scattered, by
      `collectives`. `Rounded` sends them in bfloat16. `Compressed` changes what is learned, a
      little, and a resumed run keeps it.
    small_leaf: gradients of leaves up to so many elements (a device's part) are summed, scattered
      and, updated by ZeRO-1 and 2, gathered together; leaves of up to so many in all are not
      compressed.
    reduce_layers: sum the gradients of each layer within the backward pass, beside the arithmetic
      of the layer below it, and not once a step after it; `small_leaf` then counts in a layer. With
      microbatches the bytes of these sums are sent once each: `microbatches` times as many. What
      is not stacked over layers, or is scattered once a step first (ZeRO), is summed at the end as
      ever.
    pipeline: the schedule of a mesh's `stage` axis.
    context: how attention sees whole rows where a mesh's `context` axis cuts them, in the explicit
      step: a method of `jaxtrain.context`; None is the one that suits mesh and heads.
    expert_chunk: tokens of a device that go to their experts at one time, None for all of them:
      less memory for what is sent, which is made again in the backward pass.
    health: checks of what devices compute and keep, and what is done about spikes of the loss,
      which changes what is learned; a resumed run may change it.
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

    def __post_init__(self) -> None:
        found = count("small_leaf", self.small_leaf, 0)
        if self.expert_chunk is not None:
            found += count("expert_chunk", self.expert_chunk)
        raise_violations(kind_violations(self) or found)


def seed_violations(seed: int) -> list[str]:
    if isinstance(seed, int) and 0 <= seed < SEEDS:
        return []
    return [f"seed={seed!r} must lie in [0, 2**32); use for example seed=0"]


LONGEST_SAMPLE = 2**20
"""Tokens; no model is known to read more."""


def length_violations(tokens: int) -> list[str]:
    """A continuation whose keys and values no device would hold."""
    if tokens <= LONGEST_SAMPLE:
        return []
    return [f"tokens={tokens} is more than a sample may have; use {LONGEST_SAMPLE} or less"]


@dataclass(frozen=True)
class Sample:
    """A continuation generated when training ends.

    prompt: the text that is continued. tokens: how many are drawn. temperature: logits are divided
    by it; 0 is greedy.
    """

    prompt: str
    tokens: int = 200
    temperature: float = 0.8

    def __post_init__(self) -> None:
        violations = count("tokens", self.tokens, 1)
        violations += at_least("temperature", self.temperature, 0)
        if not isinstance(self.prompt, str) or not self.prompt:
            violations.append(f"prompt={self.prompt!r} must be a text of one character or more")
        raise_violations(violations)


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss every `every` steps over the first `batches` batches of the held-out split, and
    over `final_batches` after the last step. None: the whole of it. A batch is the experiment's (of
    a `BatchRamp` the largest), whatever `microbatches` cuts it into. sample: a continuation to end
    with.
    """

    every: int = 100
    batches: int | None = 8
    final_batches: int | None = None
    sample: Sample | None = None

    def __post_init__(self) -> None:
        violations = count("every", self.every, 1)
        for name in ("batches", "final_batches"):
            if getattr(self, name) is not None:
                violations += count(name, getattr(self, name), 1)
        violations += [v for v in kind_violations(self) if v.startswith("sample=")]
        raise_violations(violations)


@dataclass(frozen=True)
class Logging:
    """every: steps between logged lines, whose speeds are means since the line before. profile:
    steps to trace. tensorboard: write events; None where tensorboardX is installed, and a run is
    refused where it is asked for and is not. callbacks: code of your own that a run calls: frozen
    dataclasses that inherit from `Callback`, or functions (or classes) at the top of a module that
    each start calls, with nothing, to make one. A resumed run may have others."""

    every: int = 10
    profile: Steps | None = None
    tensorboard: bool | None = None
    callbacks: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        violations = kind_violations(self)
        if isinstance(self.callbacks, tuple):
            violations += callback_violations("callbacks", self.callbacks)
        if isinstance(self.every, int) and self.every < 1:
            violations += count("every", self.every, 1)
        raise_violations(violations)


def _optimizer(given: Any) -> Any:
    """The optimizer that it is, or stands for."""
    if isinstance(given, optax.GradientTransformation):
        return Optax(given)
    made = not isinstance(given, type) and not hasattr(given, "build") and makes_value(given)
    return Optax(given) if made else given


@dataclass(frozen=True)
class Experiment:
    """One training run, on any mesh.

    model: a config with `build`, or a module-level function rngs -> nnx.Module whose
      `loss(batch, *, key)` returns (sum, count), and where
      you like a dict of other sums.
    data: a value with `open(split, *, seed, cache_dir)`, such as `TextData`.
    optimizer: such as `AdamW(3e-4)`; or a transformation of optax's, or a function that returns
      one, either of which is held as an `Optax`. steps: of the whole run; schedules end there.
    batch: sequences a step, or a `BatchRamp`. microbatches: parts a batch is accumulated over.
    clip_norm: bound of the global gradient norm, None for none. ema_decay: of averaged weights
      (min(ema_decay, (1 + step) / (10 + step)): a young average forgets its start sooner), which
      evaluation, sample and nothing else then use. precision: the dtypes. sharding: how tensors
      are split over mesh axes. execution: how the step is run. checkpoints: when the run is saved
      and what is kept, None for never. logging: how often metrics are written, and where.
      fine_tuning: weights to begin with, and which
      parameters are trained; None trains all of them from their initialisation.

    Raises ValueError that lists every field of the wrong kind, with what to write instead; what
    depends on other fields or on a mesh is told by `check` and `train`.
    seed: of initial weights, dropout and the order of the data. evaluation: when the held-out
    loss is taken, None for never.
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
    evaluation: Evaluation | None = Evaluation()
    checkpoints: SavePolicy | None = SavePolicy()  # noqa: RUF009 (frozen)
    logging: Logging = Logging()
    fine_tuning: FineTuning | None = None

    def __post_init__(self) -> None:
        violations = kind_violations(self)
        object.__setattr__(self, "optimizer", _optimizer(self.optimizer))
        for name, method in (("data", "open"), ("optimizer", "build")):
            held = getattr(self, name)
            if isinstance(held, type) or not callable(getattr(held, method, None)):
                example = {"data": "TextData()", "optimizer": "AdamW(3e-4)"}[name]
                call = "call it, or " if callable(held) and not isinstance(held, type) else ""
                violations.append(
                    f"{name}={held!r} has no {method}; {call}use a value such as jaxtrain.{example}"
                )
        if isinstance(self.seed, int):
            violations += seed_violations(self.seed)
        raise_violations(violations)

    @property
    def sample(self) -> Sample | None:
        """What the run ends with, if anything."""
        return None if self.evaluation is None else self.evaluation.sample
