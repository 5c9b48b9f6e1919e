"""Checks that a model can be built, and that its description is one."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from typing import Any

from jaxtrain.models.description import Member, ModelDescription
from jaxtrain.models.layered import description_of
from jaxtrain.operations.block import chain_with_ends, entry_members
from jaxtrain.operations.check import wrong_members, wrong_nodes
from jaxtrain.operations.head import Head
from jaxtrain.remedies import under
from jaxtrain.violations import count, flag

KINDS: dict[str, tuple[type, str]] = {
    "period": (tuple, "a tuple of blocks: (block, ..)"),
    "prefix": (Mapping, "a dict of blocks by their paths"),
    "suffix": (Mapping, "a dict of blocks by their paths"),
    "head": (Head, "a jaxtrain.operations.Head"),
    "fields": (Mapping, 'the fields of a batch, such as {"tokens": ("seq",)}'),
    "can": (Set, "a set of abilities, such as {'explicit'}"),
    "sums": (tuple, "a tuple of names, () for none"),
}
"""Fields of a description -> its type, and an example."""


def sound_description(model: Any) -> tuple[ModelDescription | None, list[str]]:
    """Returns the model's description, None if it has none or a wrong one, and the violations that
    keep the model from being built."""
    if violations := untried_violations(model):
        return None, under("model: ", violations)
    if not callable(getattr(model, "build", model)):
        return None, ["model: give a config with build(rngs) or a module-level function of rngs"]
    described = description_of(model)
    if described is None and "key" in _first_parameter(model):
        return None, [
            "model: it has build(key) and no describe(): give it describe(), or take build(rngs), "
            "with nnx.Rngs"
        ]
    if described is not None and (wrong := _wrong_description(described)):
        return None, [f"model.describe(): {wrong}"]
    return described, []


def untried_violations(model: Any) -> list[str]:
    """Returns violations of a model's fields. Remedies that a mesh may change have not been
    tried."""
    violations = getattr(model, "untried_violations", getattr(model, "violations", list))
    return violations()


def _first_parameter(model: Any) -> list[str]:
    """First parameter name of the model's `build`; [] if it has no signature."""
    try:
        return list(inspect.signature(model.build).parameters)[:1]
    except (AttributeError, TypeError, ValueError):
        return []


def _wrong_description(described: Any) -> str:
    """Returns the reason why a value is not a valid description; "" if it is."""
    if not isinstance(described, ModelDescription):
        return f"it returns {described!r}; return a jaxtrain.models.ModelDescription"
    for name, (kind, example) in KINDS.items():
        if not isinstance(value := getattr(described, name), kind):
            return f"{name}={value!r}; give {example}"
    if reason := _wrong_stream(described):
        return reason
    blocks = {**described.blocks, "entry": described.entry}
    for path, block in blocks.items():
        if not isinstance(block, tuple):
            return f"the block at {path} is {block!r}; a block is a tuple of operations: (.., ..)"
        for operation in block:
            if reason := wrong_nodes(operation):
                return f"the block at {path}: {reason}"
        if reason := wrong_members(block, described.stream):
            return f"the block at {path}: {reason}"
    if reason := _unread_lookups(described):
        return reason
    first = next(iter(described.fields.values()), None)
    if first != ("seq",):
        return (
            f"fields={dict(described.fields)}; name the fields of a batch with the logical axes of "
            'a row, first the one that has an element for each token, such as {"tokens": ("seq",)}'
        )
    return ""


def _wrong_stream(described: ModelDescription) -> str:
    """Returns the reason why the members of the stream are none; "" if they are."""
    stream = described.stream
    if not isinstance(stream, Mapping):
        return f"stream={stream!r}; give a dict of a jaxtrain.models.Member for each name"
    for name, member in stream.items():
        if not isinstance(name, str) or not name or not isinstance(member, Member):
            return f"stream has {name!r}: {member!r}; give a jaxtrain.models.Member for each name"
        tables = member.lookups
        if not isinstance(tables, tuple) or not all(isinstance(table, str) for table in tables):
            return f"stream[{name!r}].lookups={tables!r}; give a tuple of names of tables"
        if violations := count("width", member.width, 1) + flag("leaves", member.leaves):
            return f"stream[{name!r}]: {violations[0]}"
    lookups = tuple(table for member in stream.values() for table in member.lookups)
    if stream and {*lookups} != {*described.lookups}:
        return (
            f"lookups={described.lookups}, and the members of its stream look up {lookups}; name "
            "the same tables in both"
        )
    if stream and described.embed not in [m.width for m in stream.values() if m.leaves]:
        return (
            f"embed={described.embed} is the width of no member of the stream that leaves the "
            "stack, and the head reads one; say leaves=True, or another embed"
        )
    return ""


def _unread_lookups(described: ModelDescription) -> str:
    """Returns the reason why the tables of a member are looked up in vain; "" if none are."""
    stack = (described.entry, *described.prefix.values(), *described.period)
    (nodes, ends), names = chain_with_ends(stack), entry_members(stack)
    read = {number for node in nodes for number in node.inputs} | {*ends.members.values()}
    for number, name in enumerate(names):
        if described.stream[name].lookups and number not in read:
            return f"the tables of {name!r} are looked up, and an Update replaces what they gave"
    return ""


def positions_of(described: ModelDescription | None) -> int | None:
    """Returns the longest sequence that the model has positions for, None for any."""
    return None if described is None else described.positions


def vocab_of(model: Any, described: ModelDescription | None) -> int | None:
    """Returns the rows of the model's vocabulary; for a user's own model, its field of that
    name."""
    return getattr(model, "vocab", None) if described is None else described.head.vocab
