"""Sets single fields of an experiment from the command line: `optimizer.weight_decay=0.1`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxtrain.experiment.fields import Experiment
from jaxtrain.experiment.kinds import PRESETS, field_meant, takes, takes_none
from jaxtrain.experiment.load import config_of
from jaxtrain.experiment.stored import unreadable
from jaxtrain.experiment.vocabulary import CLASSES, DTYPES, FUNCTIONS
from jaxtrain.mesh import sharding
from jaxtrain.mesh.sharding import ShardingRules
from jaxtrain.optim import precision
from jaxtrain.violations import did_you_mean

MAKERS: dict[str, Callable[..., Any]] = {
    **{kind.__name__: kind for kind in CLASSES.values()},
    **{name: getattr(sharding, name) for name in PRESETS["sharding"]},
}
"""Callables of a setting: classes that a stored experiment may have, and sharding presets."""

DTYPE_OF: dict[str, Any] = {name: getattr(jnp, name) for name in DTYPES if hasattr(jnp, name)}
VALUES: dict[str, Any] = {
    **{f.__name__: f for group in FUNCTIONS.values() for f in reversed(group)},
    **DTYPE_OF,
    **{name: getattr(precision, name) for name in PRESETS["precision"]},
}
"""Names of a setting. The vocabulary's first function wins: ours before JAX's."""


def with_fields(experiment: Experiment, settings: Sequence[str]) -> Experiment:
    """Returns the experiment with `path=value` settings applied, such as
    optimizer.weight_decay=0.1.

    Values are Python literals, or are written as in an experiment file: precision=bf16,
    sharding="zero1() | tensor()", optimizer="SGD(0.1)"; only `MAKERS` are called. Raises ValueError
    listing every unknown path (with the nearest field), every value of another kind than the one it
    replaces, and every None where it is not allowed.
    """
    if isinstance(settings, str) or not all(isinstance(setting, str) for setting in settings):
        raise ValueError(f"settings={settings!r}; give a list of texts, such as ['precision=bf16']")
    violations = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        try:
            if not equals:
                raise ValueError("write path=value")
            changed = _replace(experiment, _names(path), text)
            if _literal(text) is text:
                _refuse_other_kinds(experiment, changed)
            experiment = changed
        except ValueError as error:
            violations.append(f"--set {setting}: {error}")
    if violations:
        raise ValueError("\n".join(violations))
    return experiment


def _names(path: str) -> list[str]:
    """Splits `period.0.mlp`, and `period[0].mlp` as other errors write it, into names."""
    return re.sub(r"\[(\d+)\]", r".\1", path).split(".")


def _refuse_other_kinds(previous: Experiment, updated: Experiment) -> None:
    """Raises ValueError if a setting adds a value that a run could not store."""
    try:
        configs = [{"experiment": config_of(experiment)} for experiment in (previous, updated)]
    except ValueError:  # one with a closure in it trains in memory, and is not stored at all
        return
    earlier, later = map(unreadable, configs)
    if new := [violation for violation in later if violation not in earlier]:
        raise ValueError("; ".join(new))


def _replace(value: Any, path: list[str], text: str) -> Any:
    name, remaining = path[0], path[1:]
    if isinstance(value, tuple):
        if not name.isdecimal() or int(name) >= len(value):
            raise ValueError(f"{name!r} is no index of a tuple of {len(value)}")
        index = int(name)
        item = _replace(value[index], remaining, text) if remaining else _value(text)
        return (*value[:index], item, *value[index + 1 :])
    fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = (
            f"the fields are {', '.join(fields)}" if fields else "write it in the experiment file"
        )
        hint = f"did you mean {near[0]!r}?" if near else hint
        raise ValueError(f"{type(value).__name__} has no field {name!r}; {hint}")
    new = _replace(getattr(value, name), remaining, text) if remaining else _read(value, name, text)
    return dataclasses.replace(value, **{name: new})


def _read(owner: Any, name: str, text: str) -> Any:
    """Returns the field's value from its text."""
    old = getattr(owner, name)
    words = isinstance(old, str) or takes(type(owner), name, text)
    new = _literal(text) if words else _value(text)
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        new = float(new)
    if new is None and takes_none(type(owner), name):
        return None
    if dataclasses.is_dataclass(new) or isinstance(new, types.FunctionType):
        return new  # checked against the field's kind with the experiment
    holds_value = dataclasses.is_dataclass(old) or isinstance(old, types.FunctionType)
    scalar = isinstance(old, (bool, int, float, str, tuple))
    if new is None or holds_value or (scalar and type(new) is not type(old)):
        if new is not None and takes(type(owner), name, new):
            return new
        dtype = next((word for word, value in DTYPE_OF.items() if value is new), None)
        is_what = f"{dtype} is a dtype" if dtype else f"{new!r} is {type(new).__name__}"
        remedy = _another(dtype or str(new), old) if holds_value else f"give {_one(type(old))}"
        raise ValueError(f"{name} is {_shown(old)}, and {is_what}; {remedy}")
    return new


def _shown(value: Any) -> str:
    """Returns a value as a user may write it; only the name of a dataclass or a function."""
    if isinstance(value, types.FunctionType):
        return value.__name__
    return type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)


def _one(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def _another(word: str, old: Any) -> str:
    """Returns a remedy for a word given in place of a dataclass or a function `old`."""
    if word in DTYPE_OF:
        presets = [name for name, value in VALUES.items() if type(value) is type(old)]
        if near := difflib.get_close_matches(word, presets, n=1, cutoff=0.5):
            return f"did you mean {near[0]}?"
    elif word in VALUES:
        return f"give {word} without quotes"
    elif name := _near(word):
        return f"did you mean {name}?"
    return "set one of its fields, or give another value as in a file: bf16, SGD(0.1)"


def _near(word: str) -> str | None:
    lower = {name.lower(): name for name in (*MAKERS, *VALUES)}
    near = difflib.get_close_matches(word.lower(), lower, n=1)
    if not near:
        return None
    name = lower[near[0]]
    return f"{name}(...)" if name in MAKERS else name


def _literal(text: str) -> Any:
    """Returns the Python literal; the text itself if it is none."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also of endless brackets
        return text


def _value(text: str) -> Any:
    """Returns the literal, or the value of an expression of `MAKERS` and `VALUES`; else the
    text."""
    if (new := _literal(text)) is not text:
        return new
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        if re.match(r"\s*[\w.]+\s*\(", text):
            raise ValueError(f"it is not a whole expression: {error.msg}") from error
        return text
    except (ValueError, RecursionError, MemoryError):
        return text
    if isinstance(tree, ast.Name) and tree.id not in {*MAKERS, *VALUES}:
        return text
    try:
        return _evaluate(tree)
    except RecursionError:
        return text


def _evaluate(node: ast.AST) -> Any:
    """Evaluates a setting as data, not as a program: it names and calls only the two tables'
    entries."""
    if isinstance(node, ast.Call):
        return _call(node)
    if isinstance(node, ast.Name | ast.Attribute):
        name = _name(node)
        if name in MAKERS:
            raise ValueError(f"{name} is no value yet; call it, {name}(...)")
        if name not in VALUES:
            raise ValueError(f"there is no {name}{_meant(name)}")
        return VALUES[name]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _evaluate(node.left), _evaluate(node.right)
        if not isinstance(left, ShardingRules) or not isinstance(right, ShardingRules):
            raise ValueError(f"{ast.unparse(node)}: only sharding presets combine with |")
        return left | right
    if isinstance(node, ast.Tuple):
        return tuple(map(_evaluate, node.elts))
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{ast.unparse(node)} is neither a literal nor a value of an experiment file"
        ) from error


def _call(node: ast.Call) -> Any:
    name = _name(node.func)
    if name not in MAKERS:
        raise ValueError(f"{name} makes no value of an experiment{_meant(name)}")
    names = [str(word.arg) for word in node.keywords]
    if "None" in names or any(isinstance(argument, ast.Starred) for argument in node.args):
        raise ValueError(f"{ast.unparse(node)}: name each field, without * and **")
    if twice := [word for word in names if names.count(word) > 1]:
        raise ValueError(f"{name}: {twice[0]} is given twice")
    arguments = [_evaluate(argument) for argument in node.args]
    named = {str(word.arg): _evaluate(word.value) for word in node.keywords}
    try:
        return MAKERS[name](*arguments, **named)
    except Exception as error:  # whatever a constructor raises
        raise ValueError(f"{name}: {error}{field_meant(error, MAKERS)}") from error


def _name(node: ast.AST) -> str:
    """Name of a node, without `jaxtrain.`: `AdamW`, also for `jaxtrain.AdamW`."""
    return ast.unparse(node).removeprefix("jaxtrain.")


def _meant(name: str) -> str:
    near = _near(name)
    return f"; did you mean {near}?" if near else did_you_mean(name, ["bf16", "SGD(0.1)", "fsdp()"])
