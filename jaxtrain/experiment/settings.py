"""Single fields of an experiment from the command line: `optimizer.weight_decay=0.1`."""

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
"""What a setting may call: the classes that a stored experiment may have, and sharding presets."""

VALUES: dict[str, Any] = {
    **{f.__name__: f for made in FUNCTIONS.values() for f in reversed(made)},
    **{name: getattr(jnp, name) for name in DTYPES if hasattr(jnp, name)},
    **{name: getattr(precision, name) for name in PRESETS["precision"]},
}
"""What it may name. Of two functions of one name the first of the vocabulary: ours before JAX's."""


def with_fields(experiment: Experiment, settings: Sequence[str]) -> Experiment:
    """The experiment with `path=value` settings applied, such as optimizer.weight_decay=0.1.

    Values are Python literals, or are written as in an experiment file: precision=bf16,
    sharding="zero1() | tensor()", optimizer="SGD(0.1)"; nothing but `MAKERS` is called. Raises
    ValueError listing every unknown path (with the nearest field), every value of another kind than
    the one it replaces, and None where no None may stand.
    """
    if isinstance(settings, str) or not all(isinstance(each, str) for each in settings):
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
    """Of `period.0.mlp`, and of `period[0].mlp`, as other errors have it."""
    return re.sub(r"\[(\d+)\]", r".\1", path).split(".")


def _refuse_other_kinds(before: Experiment, after: Experiment) -> None:
    """What a run could not store, as far as a setting has brought it in."""
    try:
        configs = [{"experiment": config_of(each)} for each in (before, after)]
    except ValueError:  # one with a closure in it trains in memory, and is not stored at all
        return
    known, found = map(unreadable, configs)
    if new := [each for each in found if each not in known]:
        raise ValueError("; ".join(new))


def _replace(value: Any, path: list[str], text: str) -> Any:
    name, rest = path[0], path[1:]
    if isinstance(value, tuple):
        if not name.isdecimal() or int(name) >= len(value):
            raise ValueError(f"{name!r} is no index of a tuple of {len(value)}")
        at = int(name)
        item = _replace(value[at], rest, text) if rest else _value(text)
        return (*value[:at], item, *value[at + 1 :])
    fields = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    if name not in fields:
        near = difflib.get_close_matches(name, fields, n=1)
        hint = (
            f"the fields are {', '.join(fields)}" if fields else "write it in the experiment file"
        )
        hint = f"did you mean {near[0]!r}?" if near else hint
        raise ValueError(f"{type(value).__name__} has no field {name!r}; {hint}")
    new = _replace(getattr(value, name), rest, text) if rest else _read(value, name, text)
    return dataclasses.replace(value, **{name: new})


def _read(owner: Any, name: str, text: str) -> Any:
    """The value that the text is for this field."""
    old = getattr(owner, name)
    words = isinstance(old, str) or takes(type(owner), name, text)
    new = _literal(text) if words else _value(text)
    if isinstance(old, float) and isinstance(new, int) and not isinstance(new, bool):
        new = float(new)
    if new is None and takes_none(type(owner), name):
        return None
    if dataclasses.is_dataclass(new) or isinstance(new, types.FunctionType):
        return new  # held to the field's kind with the whole experiment
    holds_value = dataclasses.is_dataclass(old) or isinstance(old, types.FunctionType)
    scalar = isinstance(old, (bool, int, float, str, tuple))
    if new is None or holds_value or (scalar and type(new) is not type(old)):
        if new is not None and takes(type(owner), name, new):
            return new
        raise ValueError(
            f"{name} is {_shown(old)}, and {new!r} is {type(new).__name__}; "
            + (_another(str(new)) if holds_value else f"give {_one(type(old))}")
        )
    return new


def _shown(value: Any) -> str:
    """A value as one may write it: of a dataclass or a function the name alone."""
    if isinstance(value, types.FunctionType):
        return value.__name__
    return type(value).__name__ if dataclasses.is_dataclass(value) else repr(value)


def _one(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'aeiou' else 'a'} {kind.__name__}"


def _another(word: str) -> str:
    """What to write in place of a word, where a dataclass or a function stands."""
    if word in VALUES:
        return f"give {word} without quotes"
    if near := _near(word):
        return f"did you mean {near}?"
    return "set one of its fields, or give another value as in a file: bf16, SGD(0.1)"


def _near(word: str) -> str | None:
    lower = {name.lower(): name for name in (*MAKERS, *VALUES)}
    near = difflib.get_close_matches(word.lower(), lower, n=1)
    if not near:
        return None
    name = lower[near[0]]
    return f"{name}(...)" if name in MAKERS else name


def _literal(text: str) -> Any:
    """The Python literal; the text itself where it is none."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # also of endless brackets
        return text


def _value(text: str) -> Any:
    """The literal, or what an expression of `MAKERS` and `VALUES` makes; else the text itself."""
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
    """A setting is data, and not a program: what it names and calls is in two tables."""
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
    given = [str(word.arg) for word in node.keywords]
    if "None" in given or any(isinstance(each, ast.Starred) for each in node.args):
        raise ValueError(f"{ast.unparse(node)}: name each field, without * and **")
    if twice := [each for each in given if given.count(each) > 1]:
        raise ValueError(f"{name}: {twice[0]} is given twice")
    arguments = [_evaluate(each) for each in node.args]
    named = {str(word.arg): _evaluate(word.value) for word in node.keywords}
    try:
        return MAKERS[name](*arguments, **named)
    except Exception as error:  # whatever a constructor makes of what it was given
        raise ValueError(f"{name}: {error}{field_meant(error, MAKERS)}") from error


def _name(node: ast.AST) -> str:
    """`AdamW`, also of `jaxtrain.AdamW`."""
    return ast.unparse(node).removeprefix("jaxtrain.")


def _meant(name: str) -> str:
    near = _near(name)
    return f"; did you mean {near}?" if near else did_you_mean(name, ["bf16", "SGD(0.1)", "fsdp()"])
