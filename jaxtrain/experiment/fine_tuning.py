"""A run's initial weights, and the parameters that it trains.

Leaves are named as everywhere: `period.0.attention.query`. A pattern is of `fnmatch`: `*` stands
for any text, dots included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.experiment.kinds import kind_violations
from jaxtrain.files.stores import address_violations
from jaxtrain.losses.preferences import DPO
from jaxtrain.violations import count, positive, raise_violations

Patterns = tuple[str, ...]


@dataclass(frozen=True)
class FromHuggingFace:
    """The weights of a folder in `transformers`' format. The model is `huggingface_config(folder)`,
    or one whose parameters have the same shapes (except padding of the vocabulary).

    folder: has config.json and safetensors, as `transformers` writes them; or its address in a
      store. adapters: a folder as `peft` writes it, whose adapters go on; `lora` is then
      `huggingface_lora(adapters, model)`.
    """

    folder: str | Path
    adapters: str | Path | None = None

    def __post_init__(self) -> None:
        violations = kind_violations(self) + address_violations("folder", self.folder)
        if self.adapters is not None:
            violations += address_violations("adapters", self.adapters)
        raise_violations(violations)


@dataclass(frozen=True)
class FromRun:
    """The parameters of another run's checkpoint; each chunk is verified when read.

    run_dir: that run's directory, or its address in a store. step: None for the newest. averaged:
      its averaged weights (`ema_decay`) if it has any.
    leaves: patterns of the parameters to take; the others are initialised. None takes all, and
      refuses a run whose parameters or shapes differ. trust: your own modules (`"my_package"`, or a
      tuple) that may be imported if the run's config.json names their classes or functions.
    """

    run_dir: str | Path
    step: int | None = None
    leaves: Patterns | None = None
    averaged: bool = False
    trust: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        violations = kind_violations(self)
        if not violations:
            violations = module_violations("trust", self.trust)
            violations += address_violations("run_dir", self.run_dir)
        if isinstance(self.step, int) and self.step < 1:
            violations += count("step", self.step, 1)
        raise_violations(violations or pattern_violations("leaves", self.leaves))


Start = FromHuggingFace | FromRun


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021): a matrix is used as w + (alpha / rank) A B, and only A
    [in, rank] and B [rank, out] are trained. A starts normal with variance 1 / in, B at 0.

    targets: patterns of the matrices; those of blocks can have adapters. Each expert of a mixture
      has its own A and B.
    rank: columns of A. alpha: A B is multiplied by alpha / rank.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: Patterns = ("*.attention.query", "*.attention.value")

    def __post_init__(self) -> None:
        violations = kind_violations(self)
        if not violations:
            violations = count("rank", self.rank, 1) + positive("alpha", self.alpha)
        raise_violations(violations + pattern_violations("targets", self.targets))


@dataclass(frozen=True)
class FineTuning:
    """start: initial parameters, at the first start of a run only: a resumed run has its own.
    Optimizer state, step and data start anew. None: initialised.

    trainable: patterns of the parameters that are trained. All others are frozen: they have no
      optimizer state, no gradient and no average. None: all, or with `lora` its adapters alone.
    lora: adapters, trained in addition to what `trainable` names.
    preferences: the loss of pairs of answers (`Preferences`), in place of each token's; the model
      that they are compared in is the one that the run begins with. None: each token's loss.
    """

    start: Start | None = None
    trainable: Patterns | None = None
    lora: LoRA | None = None
    preferences: DPO | None = None

    def __post_init__(self) -> None:
        raise_violations(kind_violations(self) or pattern_violations("trainable", self.trainable))


def module_violations(name: str, modules: str | tuple[str, ...]) -> list[str]:
    """Returns a violation for each value of a field that is no name of a Python module."""
    return [
        f"{name} has {module!r}, which is no module's name; write it as `import` has it, such as "
        f'{name}="my_package"'
        for module in as_modules(modules)
        if not isinstance(module, str) or not all(part.isidentifier() for part in module.split("."))
    ]


def as_modules(modules: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    return tuple(modules) if isinstance(modules, tuple | list) else (modules,)


def pattern_violations(name: str, patterns: Patterns | None) -> list[str]:
    """Returns violations of a field that holds patterns."""
    if patterns is None:
        return []
    if isinstance(patterns, tuple) and not patterns:
        return [f"{name}=() names nothing; give a pattern such as ('period.*',), or None"]
    invalid = [pattern for pattern in patterns if not isinstance(pattern, str) or not pattern]
    return [
        f"{name} has {pattern!r}; a pattern is a text such as 'period.*'" for pattern in invalid
    ]
