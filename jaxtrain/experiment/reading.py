"""Rebuilds the value that a part of config.json represents: all of it is checked before it is
built."""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtrain.experiment.fine_tuning import as_modules, module_violations
from jaxtrain.experiment.load import stored_name
from jaxtrain.experiment.vocabulary import CLASSES, DTYPES, FUNCTIONS, Slot, slots_of
from jaxtrain.violations import raise_violations

Maker = Callable[[], Any]
"""Builds a checked value."""

Trust = str | tuple[str, ...]
"""The caller's own modules, with their submodules, that a stored experiment may name."""

NAMED = re.compile(r"[^:\n]+:[^\W\d][\w.<>]*")
"""module:name. The module of an experiment file is the file's name."""
INFINITIES = ("inf", "-inf", "nan")
LARGEST = 2**63
"""Bound of an experiment's integers."""

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    types.NoneType: "null",
}


class Reader:
    """Reads stored values. violations: what is wrong with them. foreign: paths of names outside
    this library and the trusted modules. Raises ValueError if `trust` does not name modules.
    anybody: check values only, whatever the module of their classes."""

    def __init__(self, trust: Trust = (), *, anybody: bool = False) -> None:
        raise_violations(module_violations("trust", trust))
        self.trust, self.anybody = as_modules(trust), anybody
        self.violations: list[str] = []
        self.foreign: list[str] = []

    def read(self, stored: Any, slot: Slot, path: str) -> Maker:
        """Returns a function that builds the value. Call it only if there are no violations.
        Nothing is imported or built until then."""
        if isinstance(stored, dict):
            return self._object(stored, slot, path)
        if isinstance(stored, list):
            return self._tuple(stored, slot, path)
        if isinstance(stored, str):
            return self._text(stored, slot, path)
        kinds = (*slot.scalars, int) if float in slot.scalars else slot.scalars
        is_integer = isinstance(stored, int) and not isinstance(stored, bool)
        if not slot.anything and type(stored) not in kinds:
            self._wrong(stored, slot, path)
        elif is_integer and not -LARGEST <= stored < LARGEST:
            self.violations.append(f"{path} is a number beyond 64 bits; no field takes one")
        return lambda: stored

    def _object(self, stored: dict[str, Any], slot: Slot, path: str) -> Maker:
        name = stored.get("class")
        if not isinstance(name, str):
            return self._refused(f"{path}.class is {_shown(name)}; every object names its class")
        fields = {key: item for key, item in stored.items() if key != "class"}
        kind = CLASSES.get(name)
        if kind is None:
            return self._foreign_object(name, fields, slot, path)
        if not slot.anything and kind not in slot.dataclasses:
            return self._wrong(name, slot, path)
        return self._built(kind, fields, slots_of(kind), path)

    def _built(
        self, kind: type, fields: dict[str, Any], slots: dict[str, Slot], path: str
    ) -> Maker:
        self.violations += [
            f"{path}.{name} is no field of {kind.__name__}; read it with the version that wrote it"
            for name in sorted(fields.keys() - slots.keys())
        ]
        self.violations += [
            f"{path}.{f.name} is missing, and {kind.__name__} has no default for it"
            for f in dataclasses.fields(kind)
            if f.name in slots and f.name not in fields and _required(f)
        ]
        makers = {
            name: self.read(item, slots[name], f"{path}.{name}")
            for name, item in fields.items()
            if name in slots
        }
        return lambda: kind(**{name: make() for name, make in makers.items()})

    def _foreign_object(self, name: str, fields: dict[str, Any], slot: Slot, path: str) -> Maker:
        if not self._may(name, slot, path):
            return _nothing

        def make() -> Any:
            kind = self._import(name)
            if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
                raise ValueError(f"{path}: {name} is no dataclass")
            inner = Reader(self.trust)
            try:
                maker = inner._built(kind, fields, slots_of(kind), path)
                if not inner.violations:
                    return maker()
            except Exception as error:  # whatever the user's annotations and constructor raise
                raise ValueError(
                    f"{path}: {name} cannot be made ({type(error).__name__}: {error})"
                ) from error
            raise ValueError("\n  ".join(inner.violations))

        return make

    def _tuple(self, stored: list[Any], slot: Slot, path: str) -> Maker:
        if slot.anything:
            items = [slot] * len(stored)
        else:
            fitting = [
                slots * len(stored) if repeats else slots
                for slots, repeats in slot.tuples
                if repeats or len(slots) == len(stored)
            ]
            if not fitting:
                return self._wrong(stored, slot, path)
            items = list(fitting[0])
        makers = [
            self.read(stored_item, item, f"{path}[{i}]")
            for i, (stored_item, item) in enumerate(zip(stored, items, strict=True))
        ]
        return lambda: tuple(make() for make in makers)

    def _text(self, stored: str, slot: Slot, path: str) -> Maker:
        if str in slot.scalars or Path in slot.scalars:
            return lambda: stored
        if float in slot.scalars and stored in INFINITIES:
            return lambda: float(stored)
        values = (
            slot.functions | (DTYPES if slot.dtypes else {}) | (_NAMES if slot.anything else {})
        )
        if stored in values:
            return lambda: values[stored]
        is_name = NAMED.fullmatch(stored) is not None
        if slot.anything and not (is_name and self._trusts(stored)):
            return lambda: stored
        if not is_name or not slot.open:
            return self._wrong(stored, slot, path)
        return (lambda: self._import(stored)) if self._may(stored, slot, path) else _nothing

    def _trusts(self, name: str) -> bool:
        module = name.partition(":")[0]
        return self.anybody or any(
            module == trusted or module.startswith(f"{trusted}.") for trusted in self.trust
        )

    def _may(self, name: str, slot: Slot, path: str) -> bool:
        """Returns True if a class or function of another library is allowed there; otherwise adds a
        violation."""
        if NAMED.fullmatch(name) is None:
            self._refused(f"{path}.class is {_shown(name)}; a class is named as module:name")
        elif not slot.open:
            self._wrong(name, slot, path)
        elif not self._trusts(name):
            module = name.partition(":")[0].split(".")[0]
            self.foreign.append(path)
            remedy = "its experiment file alone knows it"
            if module.isidentifier():
                remedy = f'give trust="{module}" (--trust {module}), and it is imported'
            self._refused(
                f"{path} is {_shown(name)}, which is not of this library; if that code is yours, "
                + remedy
            )
        else:
            return True
        return False

    def _import(self, name: str) -> Any:
        """Returns the object that a trusted module itself defines by that name. Raises ValueError
        if it defines none, or cannot be imported."""
        module, _, path = name.partition(":")
        try:
            target: Any = importlib.import_module(module)
            for part in path.split("."):
                target = getattr(target, part)
        except Exception as error:  # whatever the user's module raises
            raise ValueError(
                f"{name} cannot be imported ({type(error).__name__}: {error}); it can be read only "
                f"where what made it can be imported"
            ) from error
        defined = f"{getattr(target, '__module__', '')}:{getattr(target, '__qualname__', '')}"
        if defined != name:
            raise ValueError(f"{name} is {defined}, which is not that module's own")
        return target

    def _refused(self, violation: str) -> Maker:
        self.violations.append(violation)
        return _nothing

    def _wrong(self, stored: Any, slot: Slot, path: str) -> Maker:
        return self._refused(f"{path} is {_shown(stored)}; a run has {_wanted(slot)} there")


_NAMES = {
    **{stored_name(function): function for group in FUNCTIONS.values() for function in group},
    **{name: dtype for name, dtype in DTYPES.items() if ":" in name},
}
"""Functions and dtypes of this library, for fields of the user's own classes."""


def _nothing() -> Any:
    raise AssertionError("what has violations is not built")


def _required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _shown(stored: Any) -> str:
    text = repr(stored)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wanted(slot: Slot) -> str:
    """Describes in words what the slot accepts."""
    words = [kind.__name__ for kind in slot.dataclasses]
    words += ["a list"] if slot.tuples else []
    words += ["a dtype"] if slot.dtypes else []
    words += ["a function"] if slot.functions else []
    words += [WORDS[kind] for kind in slot.scalars]
    return " or ".join(dict.fromkeys(words))
