"""What an experiment says. Values, not names of values; nothing here depends on a mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtrain.checkpoint.manager import SavePolicy
from jaxtrain.mesh.sharding import ShardingRules, fsdp, tensor
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.precision import Precision, fp32
from jaxtrain.telemetry.profiler import Steps


@dataclass(frozen=True)
class Execution:
    """How the same mathematics is run. None lets the platform decide.

    mode: "explicit" (our collectives, one shard_map), "gspmd" (XLA's), None: explicit for built-in
      models, gspmd for others.
    attention: an attention kernel of `jaxtrain.nn.attention`; None is the platform's own.
    check_vma: JAX's types of what varies over which mesh axis, a proof against a forgotten
      reduction; False only where a library kernel refuses it.
    """

    mode: str | None = None
    loop: LayerLoop | None = None
    attention: Any = None
    check_vma: bool | None = None


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss every `every` steps over `batches` batches (None: the whole held-out split)."""

    every: int = 100
    batches: int | None = 8


@dataclass(frozen=True)
class Sample:
    """A continuation generated when training ends. temperature 0 is greedy."""

    prompt: str
    tokens: int = 200
    temperature: float = 0.8


@dataclass(frozen=True)
class Logging:
    """every: steps between logged lines. profile: steps to trace. tensorboard: write events."""

    every: int = 10
    profile: Steps | None = None
    tensorboard: bool = True


@dataclass(frozen=True)
class Experiment:
    """One training run, on any mesh.

    model: a config with `build`, or a module-level function rngs -> nnx.Module whose
      `loss(batch, *, key)` returns (sum, count).
    data: a value with `open(split, *, seed, cache_dir)`, such as `TextData`.
    batch: sequences a step, or a `BatchRamp`. microbatches: parts a batch is accumulated over.
    clip_norm: bound of the global gradient norm, None for none. ema_decay: of averaged weights
      (min(ema_decay, (1 + step) / (10 + step)): a young average forgets its start sooner), which
      evaluation, sample and nothing else then use.
    """

    model: Any
    data: Any
    optimizer: Any
    steps: int
    batch: Any
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
    sample: Sample | None = None
