"""Single fields of an experiment from the command line: `optimizer.weight_decay=0.1`."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import types
from typing import Any

import jaxtrain
from jaxtrain.experiment.fields import Experiment
from jaxtrain.experiment.kinds import field_meant, fits, takes, takes_none
from jaxtrain.mesh.hardware import did_you_mean

PRESETS = "jaxtrain.mesh.sharding"
"""Whose functions make sharding rules."""


def with_fields(experiment: Experiment, settings: list[str]) -> Experiment:
    """The experiment with `path=value` settings applied, such as optimizer.weight_decay=0.1.

    Values are Python literals, or are written with jaxtrain's public names: precision=bf16,
    sharding="zero1() | tensor()", optimizer="SGD(0.1)". Raises ValueError listing every unknown
    path (with the nearest field), every value of another kind than the one it replaces, and None
    where no None may stand.
    """
    violations = []
    for setting in settings:
        path, equals, text = setting.partition("=")
        try:
            if not equals:
                raise ValueError(f"--set {setting}: write path=value")
            experiment = _replaced(experiment, path.split("."), text, setting)
        except ValueError as error:
            violations.append(str(error))
    if violations:
        raise ValueError("\n".join(violations))
    return experiment


def _replaced(value: Any, path: list[str], text: str, setting: str) -> Any:
    name, rest = path[0], path[1:]
    if isinstance(value, tuple):
        if not name.isdigit() or int(name) >= len(value):
            raise ValueError(f"--set {setting}: {name!r} is no index of a tuple of {len(value)}")
        at = int(name)
        if rest:
            item = _replaced(value[at], rest, text, setting)
        else:
            item = _literal(text)
            item = _made(text, setting) if item is text else item
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
        return dataclasses.replace(value, **{name: _replaced(old, rest, text, setting)})
    return dataclasses.replace(value, **{name: _read(value, name, text, setting)})


def _read(owner: Any, name: str, text: str, setting: str) -> Any:
    """The value that the text is for this field."""
    old = getattr(owner, name)
    new = _literal(text)
    if new is text and not isinstance(old, str) and not takes(type(owner), name, text):
        new = _made(text, setting)
    if dataclasses.is_dataclass(new) or callable(new):
        return _fitting(owner, name, new, setting)
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        new = float(new)
    if new is None and takes_none(type(owner), name):
        return None
    holds_value = dataclasses.is_dataclass(old) or isinstance(old, types.FunctionType)
    scalar = isinstance(old, (bool, int, float, str, tuple))
    if new is None or holds_value or (scalar and type(new) is not type(old)):
        if new is not None and takes(type(owner), name, new):
            return new
        raise ValueError(
            f"--set {setting}: {name} is {old!r}, and {new!r} is {type(new).__name__}; "
            + (_another(text) if holds_value else f"give {_one(type(old))}")
        )
    return new


def _another(text: str) -> str:
    """What to write in place of the text, where a dataclass or a function stands."""
    if near := difflib.get_close_matches(text, jaxtrain.__all__, n=1):
        return f"did you mean {near[0]}?"
    return "set one of its fields, or give another value by public names: bf16, SGD(0.1)"


def _one(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def _fitting(owner: Any, name: str, new: Any, setting: str) -> Any:
    try:
        if fits(type(owner), name, new):
            return new
    except TypeError:  # an annotation that no value can be held to, such as a dtype's
        pass
    shown = f"{new.__name__} itself" if hasattr(new, "__name__") else type(new).__name__
    called = "; call it" if _makes_values(new) else ""
    old = type(getattr(owner, name)).__name__
    raise ValueError(f"--set {setting}: {name} holds {old}, and this is {shown}{called}")


def _makes_values(thing: Any) -> bool:
    """Whether it is one of our dataclasses, or a preset of sharding."""
    if isinstance(thing, type):
        return dataclasses.is_dataclass(thing)
    return getattr(thing, "__module__", "") == PRESETS and callable(thing)


def _literal(text: str) -> Any:
    """The Python literal; the text itself where it is none."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also of endless brackets
        return text


def _made(text: str, setting: str) -> Any:
    """The value of an expression of public names; the text itself where it is none."""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text
    word = isinstance(tree, ast.Name) and tree.id not in jaxtrain.__all__
    if word or not isinstance(tree, ast.Name | ast.Call | ast.BinOp | ast.Tuple):
        return text
    try:
        return _evaluated(tree)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--set {setting}: {error}{field_meant(error, jaxtrain)}") from error


def _evaluated(node: ast.AST) -> Any:
    """Calls of our own dataclasses and of the presets of sharding, nothing else: a setting is data,
    and not a program."""
    if isinstance(node, ast.Name):
        if node.id not in jaxtrain.__all__:
            raise ValueError(f"jaxtrain has no {node.id}{did_you_mean(node.id, jaxtrain.__all__)}")
        return getattr(jaxtrain, node.id)
    if isinstance(node, ast.Call):
        make = _evaluated(node.func)
        if not _makes_values(make):
            raise ValueError(f"{ast.unparse(node.func)} is not what makes a value of an experiment")
        if any(word.arg is None for word in node.keywords):
            raise ValueError(f"{ast.unparse(node)}: name each field, without **")
        named = {str(word.arg): _evaluated(word.value) for word in node.keywords}
        return make(*map(_evaluated, node.args), **named)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _evaluated(node.left) | _evaluated(node.right)
    if isinstance(node, ast.Tuple):
        return tuple(map(_evaluated, node.elts))
    try:
        return ast.literal_eval(node)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{ast.unparse(node)} is neither a literal nor made of jaxtrain's public names"
        ) from error
