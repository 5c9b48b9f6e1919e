"""Checks of values and fields: each returns its violations, and all of them are raised at once."""

from __future__ import annotations

import difflib
import errno
import math
from collections.abc import Callable, Collection, Iterable
from functools import partial
from itertools import takewhile
from typing import TypeGuard


def raise_violations(violations: Iterable[str], subject: str = "") -> None:
    """Raises one ValueError with every violation, if there is any. subject: what they are about;
    with it several violations are a line each."""
    listed = list(violations)
    if len(listed) > 1 and subject:
        lines = "".join(f"\n  - {violation}" for violation in listed)
        raise ValueError(f"{subject}: {len(listed)} problems{lines}")
    if listed:
        raise ValueError((f"{subject}: " if subject else "") + "; ".join(listed))


LASTING = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)
"""Errors of the system that another try would meet again."""
LASTING_CODES = (errno.ELOOP, errno.ENAMETOOLONG)
"""Codes of such errors that have no class."""


def refuses(error: BaseException) -> bool:
    """True for a refusal of input, which stays one however often it is tried: a ValueError, or an
    error of the system about a path. A class with the attribute `refusal` says so itself."""
    own = getattr(error, "refusal", None)
    if own is not None:
        return own
    lasting = isinstance(error, OSError) and error.errno in LASTING_CODES
    return lasting or isinstance(error, (ValueError, *LASTING))


def nearest(word: str, options: Iterable[str]) -> str | None:
    """Returns the option most similar to `word`; among several, the one with the longest common
    start."""
    lower, word = {option.lower(): option for option in options}, word.lower()

    def same_start(option: str) -> int:
        return sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(option, word, strict=False))
        )

    best = max(difflib.get_close_matches(word, lower, n=3), key=same_start, default=None)
    return lower[best] if best else None


def did_you_mean(word: str, options: Collection[str]) -> str:
    """Returns `; did you mean X?` for the nearest option, else `; use one of ...`."""
    near = nearest(word, options)
    return f"; did you mean {near!r}?" if near else f"; use one of {', '.join(options)}"


def python_value(value: object) -> object:
    """Returns a number or flag of NumPy or JAX as Python's own; any other value as it is."""
    item = getattr(value, "item", None)
    if getattr(value, "shape", None) != () or item is None:
        return value
    try:
        return item()
    except (TypeError, RuntimeError):  # traced by JAX, deleted, or of another process
        return value


def _refused(name: str, value: object, rule: str, check: Callable[[str, object], list[str]]) -> str:
    """Returns a violation of the rule, with Python's own number where a library's is given that
    keeps it."""
    plain = python_value(value)
    if isinstance(plain, float):
        plain = float(str(value))  # 0.1 of a float32, which is not that of a float
    if type(plain) is not type(value) and not check(name, plain):
        return f"{name}={value!r} is not of a type of Python's own; use {name}={plain!r}"
    return f"{name}={value!r} must {rule}"


def positive(name: str, value: object) -> list[str]:
    """`value` must be a finite number above 0."""
    if is_number(value) and value > 0 and math.isfinite(value):
        return []
    return [_refused(name, value, "be a finite number above 0", positive)]


def at_least(name: str, value: object, least: float) -> list[str]:
    """`value` must be a finite number of at least `least`."""
    if is_number(value) and value >= least and math.isfinite(value):
        return []
    check = partial(at_least, least=least)
    return [_refused(name, value, f"be a finite number of {least} or more", check)]


def fraction(name: str, value: object) -> list[str]:
    """`value` must lie in [0, 1): a decay rate, or a momentum."""
    if is_number(value) and 0 <= value < 1:
        return []
    return [_refused(name, value, f"lie in [0, 1); use for example {name}=0.9", fraction)]


INT32_MAX = 2**31 - 1


def count(name: str, value: object, least: int = 1, most: int | None = None) -> list[str]:
    """`value` must be a whole number of at least `least`, and at most `most` unless it is None."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    if integer and least <= value and (most is None or value <= most):
        return []
    limits = f"{least} or more" if most is None else f"at least {least} and at most {most}"
    check = partial(count, least=least, most=most)
    return [_refused(name, value, f"be a whole number of {limits}", check)]


def power_of_two(name: str, value: object, least: int = 1) -> list[str]:
    """`value` must be 1, 2, 4, .., and at least `least`."""
    if isinstance(value, int) and value >= least and not value & (value - 1):
        return []
    check = partial(power_of_two, least=least)
    return [_refused(name, value, f"be a power of two of {least} or more", check)]


def ratio(name: str, value: object) -> list[str]:
    """`value` must lie in (0, 1]: a part of a whole."""
    if is_number(value) and 0 < value <= 1:
        return []
    return [_refused(name, value, "lie in (0, 1]; use for example 0.01", ratio)]


def flag(name: str, value: object) -> list[str]:
    """`value` must be True or False."""
    return [] if isinstance(value, bool) else [_refused(name, value, "be True or False", flag)]


def is_number(value: object) -> TypeGuard[float]:
    """True for an int or a float, but not for a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)
