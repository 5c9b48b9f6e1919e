"""When the held-out loss is computed, over which data, and what is generated at the end."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.data import TokenFiles
from jaxtrain.data.mixture import Mixture
from jaxtrain.experiment.kinds import kind_violations
from jaxtrain.reprs import short_repr
from jaxtrain.tasks.tasks import Tasks
from jaxtrain.violations import at_least, count, flag, raise_violations

NAME = re.compile(r"[A-Za-z0-9_.-]+")
"""Names of held-out sets."""
LEAST_TEMPERATURE = 1e-30
"""Logits of up to 1e8 divided by it stay finite in fp32."""
LONGEST_SAMPLE = 2**20
"""Tokens; no known model reads more."""


def length_violations(tokens: int) -> list[str]:
    """Returns a violation for a continuation too long for any device's memory."""
    if tokens <= LONGEST_SAMPLE:
        return []
    return [f"tokens={tokens} is more than a sample may have; use {LONGEST_SAMPLE} or less"]


def temperature_violations(temperature: float) -> list[str]:
    """Returns violations of a temperature: it must be 0, or at least `LEAST_TEMPERATURE`."""
    violations = at_least("temperature", temperature, 0)
    if not violations and 0 < temperature < LEAST_TEMPERATURE:
        return [
            f"temperature={temperature!r} must be 0, the likeliest token, or at least "
            f"{LEAST_TEMPERATURE}"
        ]
    return violations


@dataclass(frozen=True)
class Sample:
    """A continuation generated when training ends.

    prompt: the text that is continued. tokens: number of tokens drawn. temperature: divides the
      logits; 0 is greedy. chat: the prompt is a message, which the model answers by the tokenizer's
      chat template.
    """

    prompt: str
    tokens: int = 200
    temperature: float = 0.8
    chat: bool = False

    def __post_init__(self) -> None:
        violations = count("tokens", self.tokens, 1)
        violations += temperature_violations(self.temperature) + flag("chat", self.chat)
        if not isinstance(self.prompt, str) or not self.prompt:
            violations.append(f"prompt={self.prompt!r} must be a text of one character or more")
        elif not self.prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in self.prompt):
            violations.append(f"prompt={self.prompt!r} has half a surrogate, which is no text")
        raise_violations(violations)


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss every `every` steps over the first `batches` batches of the held-out split, and
    over `final_batches` after the last step. None: all batches of the split. A batch is the
    experiment's (the largest of a `BatchRamp`), regardless of `microbatches`.

    sample: a continuation at the end.
    tasks: evaluated with the held-out loss, each time. Metrics are called acc/hellaswag, ...
    sets: more held-out data, by name, as a dict or as pairs: files by name or pattern, or a source
      of files such as `TextFiles`, whose texts are read whole; or another source, or data with
      `open`, such as `TextData`, of which the held-out split is read. Texts of sources are encoded
      by the experiment's own tokenizer. Metrics of the set "code" are called eval_loss/code,
      bits_per_byte/code, ...
    """

    every: int = 100
    batches: int | None = 8
    final_batches: int | None = None
    sample: Sample | None = None
    sets: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    tasks: Tasks | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        violations = count("every", self.every, 1)
        for name in ("batches", "final_batches"):
            if getattr(self, name) is not None:
                violations += count(name, getattr(self, name), 1)
        violations += [v for v in kind_violations(self) if v.startswith(("sample=", "tasks="))]
        raise_violations(violations + set_violations(self.sets))
        sets = {k: tuple(v) if isinstance(v, list) else v for k, v in self.named_sets.items()}
        object.__setattr__(self, "sets", tuple(sets.items()))

    @property
    def named_sets(self) -> dict[str, Any]:
        """`sets` by name."""
        return dict(self.sets)


GIVE_DATA = (
    "give files by name or pattern, a source such as TextFiles(...), or data such as TextData(...)"
)


def set_violations(sets: Any) -> list[str]:
    """Returns a violation for each of `Evaluation.sets` that is no name with data, and for names
    that two have."""
    pairs = tuple(sets.items()) if isinstance(sets, Mapping) else sets
    is_listed = isinstance(pairs, list | tuple)
    if not is_listed or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return [
            f"sets={sets!r} is no dict of names and data, nor pairs of them; use for example "
            'sets={"code": TextFiles("src/**/*.py")}'
        ]
    violations, names = [], set[str]()
    for name, data in pairs:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            violations.append(
                f"sets has the name {name!r}; use letters, digits and _ . -, of which metrics are "
                'named, such as "code"'
            )
        elif name in names:
            violations.append(f"sets has two of the name {name!r}; give each another name")
        else:
            names.add(name)
        if not readable(data):
            violations.append(f"sets[{name!r}]={data!r} cannot be read; {GIVE_DATA}")
    return violations


def readable(data: Any) -> bool:
    """Returns True for what may be held-out data: files by name, a source of texts, data with
    `open`."""
    if isinstance(data, str | Path):
        return True
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(pattern, str | Path) for pattern in data)
    if isinstance(data, type):
        return False
    return is_source(data) or callable(getattr(data, "open", None))


def is_source(data: Any) -> bool:
    """Returns True for texts that a tokenizer has yet to encode, and for tokens in files."""
    return hasattr(data, "pieces") or isinstance(data, Mixture | TokenFiles)
