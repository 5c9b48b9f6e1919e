"""What a run begins with, and which of its parameters it trains.

Leaves are named as everywhere: `period.0.attention.query`. A pattern is of `fnmatch`: `*` stands
for any text, dots included.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxtrain.experiment.kinds import kind_violations
from jaxtrain.files.stores import store_violations
from jaxtrain.violations import count, positive, raise_violations

Patterns = tuple[str, ...]


@dataclass(frozen=True)
class FromHuggingFace:
    """The weights of a folder as `transformers` writes it. The model is
    `huggingface_config(folder)`, or one whose parameters have the same shapes (padding of the
    vocabulary aside).

    folder: config.json beside safetensors, as `transformers` writes them.
    """

    folder: str | Path

    def __post_init__(self) -> None:
        raise_violations(kind_violations(self) + store_violations("folder", self.folder))


@dataclass(frozen=True)
class FromRun:
    """The parameters of another run's checkpoint, each chunk verified as it is read.

    run_dir: that run's directory. step: None for the newest. averaged: its averaged weights
    (`ema_decay`) where it keeps any.
    leaves: patterns of the parameters to take; the others are initialised. None takes all, and
    refuses a run that has not just the same ones, of the same shapes. trust: modules of your own
    (`"my_package"`, or a tuple) that are imported where the run's config.json names their classes
    or functions.
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
            violations += store_violations("run_dir", self.run_dir)
        if isinstance(self.step, int) and self.step < 1:
            violations += count("step", self.step, 1)
        raise_violations(violations or pattern_violations("leaves", self.leaves))


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters (Hu et al. 2021): a matrix is used as w + (alpha / rank) A B, and only A
    [in, rank] and B [rank, out] are trained. A begins normal with variance 1 / in, B at 0.

    targets: patterns of the matrices; those of blocks can have adapters. Of a mixture of experts
    each has A and B of its own.
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
    """start: what the parameters begin with, at the first start of a run only: a resumed one has
    its own. Optimizer state, step and data begin anew. None: initialised.

    trainable: patterns of the parameters that are trained. All others are frozen: they have no
    optimizer state, no gradient and no average. None: all, or with `lora` its adapters alone.
    lora: adapters, trained beside what `trainable` names.
    """

    start: FromHuggingFace | FromRun | None = None
    trainable: Patterns | None = None
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        raise_violations(kind_violations(self) or pattern_violations("trainable", self.trainable))


def module_violations(name: str, modules: str | tuple[str, ...]) -> list[str]:
    """What is wrong with a field that names modules."""
    return [
        f"{name} has {each!r}, which is no module's name; write it as `import` has it, such as "
        f'{name}="my_package"'
        for each in as_modules(modules)
        if not isinstance(each, str) or not all(part.isidentifier() for part in each.split("."))
    ]


def as_modules(modules: str | tuple[str, ...]) -> tuple[str, ...]:
    return modules if isinstance(modules, tuple) else (modules,)


def pattern_violations(name: str, patterns: Patterns | None) -> list[str]:
    """What is wrong with a field that holds patterns."""
    if patterns is None:
        return []
    if isinstance(patterns, tuple) and not patterns:
        return [f"{name}=() names nothing; give a pattern such as ('period.*',), or None"]
    wrong = [each for each in patterns if not isinstance(each, str) or not each]
    return [f"{name} has {each!r}; a pattern is a text such as 'period.*'" for each in wrong]
