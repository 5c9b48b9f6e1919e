"""The fields of a config.json, taken one by one: what is wrong is collected, not raised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain.models.validate import SIZE, too_many

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
"""Fields that leave the function from tokens to logits as it is: how a model was or is to be
trained (dropout, the balance and jitter of routers), split or served."""

HARMLESS_BEGINNINGS = ("_", "output_", "summary_")
HARMLESS_ENDINGS = ("_token_id", "_version")


class Fields:
    """A JSON object as its reader takes it: `given` are the fields, each of which is asked for by
    name. `problems` collects what is missing, of another type, or out of range; the value returned
    is then a stand-in. `where` is put before names, as in `rope_scaling.`"""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        self.given, self.where = given, where
        self.taken: set[str] = set()
        self.problems: list[str] = []

    def value(self, name: str) -> Any:
        """As it stands, None where it is missing."""
        self.taken.add(name)
        return self.given.get(name)

    def count(self, name: str, otherwise: int | None = None, most: int = SIZE) -> int:
        """A whole number from 1 to `most`; `otherwise` where it is null or missing."""
        found = self.value(name)
        if found is None and otherwise is not None:
            return otherwise
        if isinstance(found, int) and not isinstance(found, bool) and found >= 1:
            if violations := too_many(f"{self.where}{name}", found, most):
                self.problems += violations
                return 1
            return found
        return self._wrong(name, "a whole number of at least 1", 1)

    def count_or_none(self, name: str) -> int | None:
        return None if self.value(name) is None else self.count(name)

    def whole(self, name: str) -> int:
        """A whole number from 0."""
        found = self.value(name)
        if isinstance(found, int) and not isinstance(found, bool) and 0 <= found <= SIZE:
            return found
        return self._wrong(name, "a whole number of at least 0", 0)

    def number(self, name: str) -> float:
        """A finite number above 0."""
        found = self.value(name)
        number = isinstance(found, (int, float)) and not isinstance(found, bool)
        if number and 0 < found < math.inf:
            return float(found)
        return self._wrong(name, "a number above 0", 1.0)

    def number_or_none(self, name: str) -> float | None:
        return None if self.value(name) is None else self.number(name)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        found = self.value(name)
        listed = found if isinstance(found, list) else [None]
        each = [Fields({name: number}) for number in listed]
        numbers = tuple(one.number(name) for one in each)
        if any(one.problems for one in each):
            return self._wrong(name, "a list of numbers above 0", (1.0,))
        return numbers

    def flag(self, name: str) -> bool:
        found = self.value(name)
        return found if isinstance(found, bool) else self._wrong(name, "true or false", False)

    def choice(self, name: str, choices: Mapping[str, Any]) -> Any:
        """What the table has for the value; the first of it stands in."""
        found = self.value(name)
        if isinstance(found, str) and found in choices:
            return choices[found]
        return self._wrong(name, "one of " + ", ".join(choices), next(iter(choices.values())))

    def only(self, name: str, *allowed: Any) -> None:
        """A field of which this library computes only these values, or none."""
        found = self.value(name)
        if found is not None and found not in allowed:
            self._wrong(name, " or ".join(map(repr, allowed)), None)

    def multiple(self, name: str, of: str) -> None:
        """Two counts of which one is a multiple of the other; of unsound ones that is told."""
        whole, part = self.given.get(name), self.given.get(of)
        sound = isinstance(whole, int) and isinstance(part, int) and whole >= 1 and part >= 1
        if sound and whole % part:
            self.problems.append(
                f"{self.where}{name}={whole} is not a multiple of {of}={part}; use "
                f"{whole // part * part or part} or {-(-whole // part) * part}"
            )

    def unknown(self) -> list[str]:
        """What nobody took and nobody knows. A field that is null or false is off."""
        left = [name for name in self.given if name not in self.taken | HARMLESS]
        found = [
            f"{self.where}{name}={self.given[name]!r}"
            for name in left
            if not name.startswith(HARMLESS_BEGINNINGS)
            and not name.endswith(HARMLESS_ENDINGS)
            and self.given[name] is not None
            and self.given[name] is not False
        ]
        remedy = "is not known here; where it does not change the logits, remove it"
        return [f"{field} {remedy}" for field in found]

    def _wrong(self, name: str, needed: str, instead: Any) -> Any:
        if name in self.given:
            self.problems.append(f"{self.where}{name}={self.given[name]!r}; use {needed}")
        else:
            self.problems.append(f"{self.where}{name} is missing; give {needed}")
        return instead
