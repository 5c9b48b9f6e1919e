"""Experiments from Python files, single fields from the command line, and config.json."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import math
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.experiment.fields import Experiment
from jaxtrain.experiment.kinds import takes, takes_none
from jaxtrain.files.stores import local_path
from jaxtrain.mesh.hardware import did_you_mean


def load_experiment(path: str | Path) -> Experiment:
    """experiment() of a Python file. Raises ValueError that says what is missing or not allowed:
    no such file or function, a lambda or closure in a field, an object that is not a value."""
    path = local_path("experiment", path)
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.py")], n=1)
        hint = f"did you mean {path.parent / near[0]}?" if near else "give the path of a .py file"
        raise ValueError(f"there is no experiment file {path}; {hint}")
    name = f"jaxtrain_experiment_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file; an experiment file ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises is its own mistake
        raise ValueError(f"{path} does not load: {_told(error, path, module)}") from error
    make = getattr(module, "experiment", None)
    if not callable(make):
        raise ValueError(f"{path} has no function experiment(); define one that returns Experiment")
    try:
        experiment = make()
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path}: experiment() failed: {_told(error, path, module)}") from error
    if not isinstance(experiment, Experiment):
        raise ValueError(
            f"{path}: experiment() returned {type(experiment).__name__}; return jaxtrain.Experiment"
        )
    config_of(experiment)
    return experiment


def _told(error: BaseException, path: Path, module: types.ModuleType) -> str:
    """The error, and the line of the file it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    path = path.resolve()
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    at = f"line {lines[-1]}: " if lines else ""
    return f"{at}{type(error).__name__}: {error}{_field_meant(error, module)}"


def _field_meant(error: BaseException, module: types.ModuleType) -> str:
    """The field nearest to a misspelt one of a dataclass that the file imports."""
    found = re.fullmatch(r"(\w+)\.__init__\(\).*unexpected keyword argument '(\w+)'", str(error))
    kind = found and getattr(module, found[1], None)
    if not found or not dataclasses.is_dataclass(kind):
        return ""
    return did_you_mean(found[2], [each.name for each in dataclasses.fields(kind)])


def config_of(value: Any) -> Any:
    """A JSON-able form: dataclasses by field with their class, functions as module:name.

    Raises ValueError that lists every field that is not a scalar, a tuple, a frozen dataclass or a
    module-level function.
    """
    violations: list[str] = []
    config = _config(value, "experiment", violations)
    if violations:
        raise ValueError("\n".join(violations))
    return config


def _config(value: Any, path: str, violations: list[str]) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            violations.append(f"{path}: {type(value).__name__} can change; use a frozen dataclass")
        fields = {
            f.name: _config(getattr(value, f.name), f"{path}.{f.name}", violations)
            for f in dataclasses.fields(value)
        }
        return {"class": stored_name(type(value)), **fields}
    if isinstance(value, tuple):
        return [_config(v, f"{path}[{i}]", violations) for i, v in enumerate(value)]
    if callable(value) and hasattr(value, "__qualname__"):
        if "<" in value.__qualname__:
            violations.append(
                f"{path} is {value.__qualname__}: lambdas and closures cannot be stored; "
                f"write a function at the top of a module"
            )
        return stored_name(value)
    if isinstance(value, (type, np.dtype)):
        return np.dtype(value).name
    violations.append(
        f"{path} is {type(value).__name__}; a field is a scalar, a tuple, a frozen dataclass or a "
        f"module-level function"
    )
    return None


def stored_name(thing: Any) -> str:
    """A class or a function as config.json names it: module:name."""
    module = thing.__module__.removeprefix("jaxtrain_experiment_")
    return f"{module}:{thing.__qualname__}"


def with_fields(experiment: Experiment, settings: list[str]) -> Experiment:
    """The experiment with `path=value` settings applied, such as optimizer.weight_decay=0.1.

    Values are Python literals. Raises ValueError listing every unknown path (with the nearest
    field), every value of another kind than the one it replaces, and None where no None may stand.
    """
    violations = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        try:
            if not equals:
                raise ValueError(f"--set {setting}: write path=value")
            experiment = _replaced(experiment, path.split("."), _literal(text), setting)
        except ValueError as error:
            violations.append(str(error))
    if violations:
        raise ValueError("\n".join(violations))
    return experiment


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also of endless brackets
        return text


def _replaced(value: Any, path: list[str], new: Any, setting: str) -> Any:
    name, rest = path[0], path[1:]
    if isinstance(value, tuple):
        if not name.isdigit() or int(name) >= len(value):
            raise ValueError(f"--set {setting}: {name!r} is no index of a tuple of {len(value)}")
        at = int(name)
        item = _replaced(value[at], rest, new, setting) if rest else new
        return (*value[:at], item, *value[at + 1 :])
    fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = (
            f"the fields are {', '.join(fields)}" if fields else "write it in the experiment file"
        )
        hint = f"did you mean {near[0]!r}?" if near else hint
        raise ValueError(f"--set {setting}: {type(value).__name__} has no field {name!r}; {hint}")
    old = getattr(value, name)
    if rest:
        return dataclasses.replace(value, **{name: _replaced(old, rest, new, setting)})
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        new = float(new)
    if new is None and takes_none(type(value), name):
        return dataclasses.replace(value, **{name: None})
    holds_value = dataclasses.is_dataclass(old) or isinstance(old, types.FunctionType)
    scalar = isinstance(old, (bool, int, float, str, tuple))
    if new is None or holds_value or (scalar and type(new) is not type(old)):
        if new is not None and takes(type(value), name, new):
            return dataclasses.replace(value, **{name: new})
        needed = f"give {'an' if type(old).__name__[0] in 'aeiou' else 'a'} {type(old).__name__}"
        raise ValueError(
            f"--set {setting}: {name} is {old!r}, and {new!r} is {type(new).__name__}; "
            + ("set one of its fields" if holds_value else needed)
        )
    return dataclasses.replace(value, **{name: new})
