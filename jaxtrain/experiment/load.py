"""Loads experiments from Python files, and converts them to config.json's form."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import math
import sys
import traceback
import types
from pathlib import Path
from typing import Any

import numpy as np
import optax

from jaxtrain.experiment.fields import Experiment
from jaxtrain.experiment.kinds import field_meant
from jaxtrain.files.stores import local_path
from jaxtrain.optim.plain import Optax


def load_experiment(path: str | Path) -> Experiment:
    """Returns the value of experiment() in a Python file. Raises ValueError if the file or the
    function is missing, or if a field holds a lambda, a closure or an object that is not a value.
    """
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
    # Files in its folder can be imported, as for a script; installed modules come first.
    folder = path.parent.resolve()
    _refuse_mistaken_imports(path, folder)
    _folders.add(folder)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    sys.modules[name] = module  # dataclasses and pickling look a class's module up by name
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever a user's file raises is its own mistake
        raise ValueError(f"{path} does not load: {_error_at_line(error, path, module)}") from error
    make = getattr(module, "experiment", None)
    if not callable(make):
        raise ValueError(f"{path} has no function experiment(); define one that returns Experiment")
    try:
        experiment = make()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{path}: experiment() failed: {_error_at_line(error, path, module)}"
        ) from error
    if not isinstance(experiment, Experiment):
        raise ValueError(
            f"{path}: experiment() returned {type(experiment).__name__}; return jaxtrain.Experiment"
        )
    config_of(experiment)
    return experiment


_folders: set[Path] = set()
"""Folders of the experiment files that were loaded."""


def _refuse_mistaken_imports(path: Path, folder: Path) -> None:
    """Raises ValueError if a file imports a module of its folder, and a module with that name from
    another experiment's folder is already imported: Python would return that one."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return  # reported when it is loaded
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    for name in sorted({name.partition(".")[0] for name in names} - {""}):
        imported = getattr(sys.modules.get(name), "__file__", None)
        candidates = [
            candidate for candidate in (folder / f"{name}.py", folder / name) if candidate.exists()
        ]
        if imported is None or not candidates:
            continue
        other_folders = _folders - {folder}
        if other_folders & set(Path(imported).resolve().parents[:2]):
            raise ValueError(
                f"{path} imports {name} and means {candidates[0]}, and {imported}, beside another "
                "experiment file, is imported by that name; load the two in different processes, "
                "or give one of the files another name"
            )


def _error_at_line(error: BaseException, path: Path, module: types.ModuleType) -> str:
    """Returns the error's text, with the line of the file that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    path = path.resolve()
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
    location = f"line {lines[-1]}: " if lines else ""
    return f"{location}{type(error).__name__}: {error}{field_meant(error, vars(module))}"


def config_of(value: Any) -> Any:
    """Returns a value's JSON form: dataclasses by field with their class, functions as module:name.

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
    if isinstance(value, Optax):  # stored as written: a function, or an optax transformation
        return _config(value.given, path, violations)
    if isinstance(value, optax.GradientTransformation):
        violations.append(
            f"{path} is an optax transformation, two closures, which cannot be stored; write a "
            f"function at the top of a module that returns it, `def adam(): return "
            f"optax.adamw(3e-4)`, and give {path.rpartition('.')[2]}=adam"
        )
        return None
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if not type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
            violations.append(f"{path}: {type(value).__name__} can change; use a frozen dataclass")
        fields = {
            f.name: _config(getattr(value, f.name), f"{path}.{f.name}", violations)
            for f in dataclasses.fields(value)
        }
        if "<" in type(value).__qualname__:
            violations.append(
                f"{path} is of {type(value).__qualname__}: classes within a function cannot be "
                "stored; define it at the top of a module"
            )
        return {"class": stored_name(type(value)), **fields}
    if isinstance(value, tuple):
        return [_config(v, f"{path}[{i}]", violations) for i, v in enumerate(value)]
    if callable(value) and hasattr(value, "__qualname__"):
        if "<" in value.__qualname__:
            violations.append(
                f"{path} is {value.__qualname__}: lambdas and closures cannot be stored; what this "
                "field takes has to be defined at the top of a module"
            )
        return stored_name(value)
    if isinstance(value, (type, np.dtype)):
        return np.dtype(value).name
    violations.append(
        f"{path} is {type(value).__name__}; a field is a scalar, a tuple, a frozen dataclass or a "
        f"module-level function or class"
    )
    return None


def stored_name(thing: Any) -> str:
    """Returns the name of a class or a function in config.json: module:name."""
    module = thing.__module__.removeprefix("jaxtrain_experiment_")
    return f"{module}:{thing.__qualname__}"
