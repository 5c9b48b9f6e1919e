"""Validated access to the fields of a config.json; problems are collected, not raised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.transformer.validate import SIZE, too_many

HARMLESS = {
    "architectures",
    "attention_dropout",
    "attn_pdrop",
    "auto_map",  # code that came with a folder before `transformers` had the family
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "embd_pdrop",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "keys_to_ignore_at_inference",
    "label2id",
    "max_position_embeddings",
    "max_sequence_length",
    "model_type",
    "n_ctx",
    "pretraining_tp",
    "problem_type",
    "reorder_and_upcast_attn",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers.js_config",
    "use_cache",
}
"""Fields that do not change the logits: about training (dropout, the balance and jitter of
routers), splitting or serving of a model."""

HARMLESS_BEGINNINGS = ("_", "output_", "summary_")
HARMLESS_ENDINGS = ("_token_id", "_version")


class Fields:
    """Validated access to a JSON object by field names.

    content: the fields. prefix: of names in messages, as `rope_scaling.`. used: names that were
    read. problems: fields that are missing, of another type, or out of range; the returned value is
    then a placeholder.
    """

    def __init__(self, content: Mapping[str, Any], prefix: str = "") -> None:
        self.content, self.prefix = content, prefix
        self.used: set[str] = set()
        self.problems: list[str] = []

    def value(self, name: str) -> Any:
        """Returns the unchecked value, None where it is missing."""
        self.used.add(name)
        return self.content.get(name)

    def count(self, name: str, otherwise: int | None = None, most: int = SIZE) -> int:
        """Returns an integer from 1 to `most`; `otherwise` where the field is null or missing."""
        value = self.value(name)
        if value is None and otherwise is not None:
            return otherwise
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            if violations := too_many(f"{self.prefix}{name}", value, most):
                self.problems += violations
                return 1
            return value
        return self._wrong(name, "a whole number of at least 1", 1)

    def count_or_none(self, name: str) -> int | None:
        return None if self.value(name) is None else self.count(name)

    def whole(self, name: str) -> int:
        """Returns an integer from 0."""
        value = self.value(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= SIZE:
            return value
        return self._wrong(name, "a whole number of at least 0", 0)

    def number(self, name: str) -> float:
        """Returns a finite number above 0."""
        value = self.value(name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and 0 < value < math.inf:
            return float(value)
        return self._wrong(name, "a number above 0", 1.0)

    def number_or_none(self, name: str) -> float | None:
        return None if self.value(name) is None else self.number(name)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Returns a list of finite numbers above 0."""
        value = self.value(name)
        listed = value if isinstance(value, list) else [None]
        items = [Fields({name: number}) for number in listed]
        numbers = tuple(item.number(name) for item in items)
        if any(item.problems for item in items):
            return self._wrong(name, "a list of numbers above 0", (1.0,))
        return numbers

    def flag(self, name: str) -> bool:
        value = self.value(name)
        return value if isinstance(value, bool) else self._wrong(name, "true or false", False)

    def choice(self, name: str, choices: Mapping[str, Any]) -> Any:
        """Returns the entry of `choices` for the value; the first entry after a problem."""
        value = self.value(name)
        if isinstance(value, str) and value in choices:
            return choices[value]
        return self._wrong(name, "one of " + ", ".join(choices), next(iter(choices.values())))

    def only(self, name: str, *allowed: Any) -> None:
        """Checks a field of which this library computes only the `allowed` values, or none."""
        value = self.value(name)
        if value is not None and value not in allowed:
            self._wrong(name, " or ".join(map(repr, allowed)), None)

    def multiple(self, name: str, divisor: str) -> None:
        """Checks that count `name` is a multiple of count `divisor`. Ignores invalid counts, which
        are reported elsewhere."""
        count, unit = self.content.get(name), self.content.get(divisor)
        valid = isinstance(count, int) and isinstance(unit, int) and count >= 1 and unit >= 1
        if valid and count % unit:
            self.problems.append(
                f"{self.prefix}{name}={count} is not a multiple of {divisor}={unit}; use "
                f"{count // unit * unit or unit} or {-(-count // unit) * unit}"
            )

    def unknown(self) -> list[str]:
        """Returns a line for each field that was not read and is not known. A field that is null or
        false is off."""
        left = [name for name in self.content if name not in self.used | HARMLESS]
        unknown = [
            f"{self.prefix}{name}={self.content[name]!r}"
            for name in left
            if not name.startswith(HARMLESS_BEGINNINGS)
            and not name.endswith(HARMLESS_ENDINGS)
            and self.content[name] is not None
            and self.content[name] is not False
        ]
        remedy = "is not known here; where it does not change the logits, remove it"
        return [f"{field} {remedy}" for field in unknown]

    def _wrong(self, name: str, needed: str, instead: Any) -> Any:
        if name in self.content:
            self.problems.append(f"{self.prefix}{name}={self.content[name]!r}; use {needed}")
        else:
            self.problems.append(f"{self.prefix}{name} is missing; give {needed}")
        return instead
