"""Checks that a field's value has the kind of its annotation, and suggests a replacement."""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from jaxtrain.public import public_path
from jaxtrain.violations import did_you_mean, python_value

PRESETS = {
    "precision": {name: name for name in ("fp32", "bf16", "fp16", "fp8", "int8")},
    "sharding": {
        name: f"{name}()" for name in ("data_parallel", "fsdp", "tensor", "zero1", "zero2")
    },
}
"""Named values of `jaxtrain`, by the field they belong to."""

WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a text in quotes",
    tuple: "a tuple of texts such as ('period.*',)",
    types.NoneType: "None",
}


def kind_violations(value: Any) -> list[str]:
    """Returns a violation, with its remedy, for each field whose value is not of its annotation's
    kind."""
    hints = typing.get_type_hints(type(value))
    values = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return [
        f"{name}={stored!r} is a {type(stored).__name__}; use {_remedy(name, stored, hints[name])}"
        for name, stored in values.items()
        if not _fits(stored, hints[name])
    ]


def takes_none(owner: type, name: str) -> bool:
    """Returns True if the field accepts None."""
    kinds = _kinds(_hint(owner, name))
    return Any in kinds or types.NoneType in kinds


def takes(owner: type, name: str, value: Any) -> bool:
    """Returns True if the field is annotated as a union, and the value is of one of its types."""
    hint = _hint(owner, name)
    return len(_kinds(hint)) > 1 and Any not in _kinds(hint) and _fits(value, hint)


def _hint(owner: type, name: str) -> Any:
    try:
        return typing.get_type_hints(owner)[name]
    except NameError as error:
        raise ValueError(
            f"{owner.__name__} has an annotation that says nothing when the program runs: {error}; "
            f"import the name outside TYPE_CHECKING"
        ) from error


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Returns the members of a union, or the annotation itself. `tuple[str, ...]` becomes tuple."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if union else (hint,)
    return tuple(typing.get_origin(member) or member for member in members)


def _fits(value: Any, hint: Any) -> bool:
    kinds = _kinds(hint)
    if Any in kinds:
        return True
    if isinstance(value, bool):  # to Python a bool is an int
        return bool in kinds
    try:
        return isinstance(value, (*kinds, int) if float in kinds else kinds)
    except TypeError:  # a protocol, which is not checked here
        return False


def _remedy(name: str, value: Any, hint: Any) -> str:
    if (plain := python_value(value)) is not value and _fits(plain, hint):
        return f"{type(plain).__name__}(...) of it"
    word = value if isinstance(value, str) else getattr(value, "__name__", None)
    if word and (preset := PRESETS.get(name, {}).get(word)):
        return f"{name}={public_path(word)}{preset.removeprefix(word)}"
    kinds = _kinds(hint)
    for kind in kinds:
        if dataclasses.is_dataclass(kind) and type(value) in (int, str):
            first = next((field.name for field in dataclasses.fields(kind)), None)
            if first in ("every", "prompt") and _fits(value, _first_hint(kind)):
                return f"{name}={public_path(kind.__name__)}({first}={value!r})"
    return " or ".join(
        WORDS.get(kind) or f"a {public_path(kind.__name__) or kind.__name__}" for kind in kinds
    )


def _first_hint(kind: Any) -> Any:
    return typing.get_type_hints(kind)[dataclasses.fields(kind)[0].name]


def makes_value(value: Any) -> bool:
    """Returns True if the value is a function, or a class, that is called without arguments."""
    try:
        inspect.signature(value).bind()
    except (TypeError, ValueError):  # not callable, has required arguments, or no signature
        return False
    return True


def callback_violations(name: str, callbacks: tuple[Any, ...]) -> list[str]:
    """Returns a violation for each item of `callbacks` that is not a callback."""
    return [
        f"{name}[{index}]={callback!r} is no callback; use a value whose class inherits from "
        "jaxtrain.Callback, or a function (or class) of no arguments that makes one"
        for index, callback in enumerate(callbacks)
        if isinstance(callback, type) or not callable(getattr(callback, "after_step", None))
        if not makes_value(callback)
    ]


def field_meant(error: BaseException, classes: Mapping[str, Any]) -> str:
    """Returns a hint with the field nearest to a misspelt one. classes: dataclasses by name."""
    match = re.fullmatch(r"(\w+)\.__init__\(\).*unexpected keyword argument '(\w+)'", str(error))
    kind = match and classes.get(match[1])
    if not match or not dataclasses.is_dataclass(kind):
        return ""
    return did_you_mean(match[2], [field.name for field in dataclasses.fields(kind)])
