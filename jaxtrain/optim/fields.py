"""Checks of config fields: each gives its violations, and all of a value are raised at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeGuard


def raise_violations(violations: Iterable[str]) -> None:
    """Raise one ValueError that lists every violation; none is no error."""
    found = list(violations)
    if found:
        raise ValueError("; ".join(found))


def positive(name: str, value: object) -> list[str]:
    """`value` must be a finite number above 0."""
    if _is_number(value) and value > 0 and math.isfinite(value):
        return []
    return [f"{name}={value!r} must be a finite number above 0"]


def at_least(name: str, value: object, least: float) -> list[str]:
    """`value` must be a finite number of at least `least`."""
    if _is_number(value) and value >= least and math.isfinite(value):
        return []
    return [f"{name}={value!r} must be a finite number of {least} or more"]


def fraction(name: str, value: object) -> list[str]:
    """`value` must lie in [0, 1): a decay rate, or a momentum."""
    if _is_number(value) and 0 <= value < 1:
        return []
    return [f"{name}={value!r} must lie in [0, 1); use for example {name}=0.9"]


def count(name: str, value: object, least: int) -> list[str]:
    """`value` must be an integer of at least `least`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= least:
        return []
    return [f"{name}={value!r} must be an integer of {least} or more"]


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
