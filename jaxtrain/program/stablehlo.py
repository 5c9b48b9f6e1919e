"""The collectives of a program as it is handed to XLA (StableHLO), before XLA rewrites any.

The dtype of what is sent is visible only here: XLA:CPU compiles 16-bit collectives as fp32, so a
compiled program does not show what was sent as fp32 by mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain.program.collectives import SENT, Collective, ragged_buffer
from jaxtrain.program.groups import DeviceGroups, connected, replica_groups
from jaxtrain.program.text import Shape

if TYPE_CHECKING:
    import jax
    from jaxlib.mlir import ir

_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
_DTYPES = {"i1": "pred", "i": "s", "ui": "u"}
"""MLIR's names of integers -> HLO's; floats have one name in both."""


def lowered_collectives(lowered: jax.stages.Lowered) -> list[Collective]:
    """Returns every collective of a lowered program (`jax.jit(...).lower(...)`), in program order.

    Code that XLA will later remove is included, and all branches of a conditional count as always
    taken (`in_branch`): so `count` is the most that may run.

    Raises `ValueError` when one stands in a loop without a static trip count.
    """
    text: Any = lowered.compiler_ir("stablehlo")
    module = text.operation
    named = {_text(op.attributes["sym_name"]): op for op in _operations(module)}
    done: dict[str, list[Collective]] = {}

    def called(name: str) -> list[Collective]:
        if name not in done:
            done[name] = [c for op in _operations(named[name]) for c in collectives_in(op)]
        return done[name]

    def collectives_in(op: ir.Operation) -> list[Collective]:
        if op.name == "func.call":
            return called(_text(op.attributes["callee"]).lstrip("@"))
        if _kind(op) in SENT:
            return list(_collectives(op, named))
        inner = [c for child in _operations(op) for c in collectives_in(child)]
        if op.name == "stablehlo.while" and inner:
            turns = _turns(op)
            return [replace(item, count=item.count * turns) for item in inner]
        if op.name in ("stablehlo.case", "stablehlo.if"):
            return [replace(item, in_branch=True) for item in inner]
        return inner

    return called("main")


def _operations(op: ir.Operation) -> Iterator[ir.Operation]:
    """Operations directly within an operation."""
    for region in op.regions:
        for block in region.blocks:
            yield from (child.operation for child in block.operations)


def _kind(op: ir.Operation) -> str:
    """HLO's name of an operation; a ragged all-to-all is a custom call in StableHLO."""
    called = op.name == "stablehlo.custom_call"
    name = _text(op.attributes["call_target_name"]) if called else op.name
    return name.removeprefix("stablehlo.").replace("_", "-")


def _collectives(op: ir.Operation, named: Mapping[str, ir.Operation]) -> Iterator[Collective]:
    kind = _kind(op)
    groups = _groups(op, kind, named)
    size = max(map(len, groups), default=1)
    shapes = [_shape(value) for value in (op.results if kind == "all-gather" else op.operands)]
    for shape in [ragged_buffer(shapes)] if kind == "ragged-all-to-all" else shapes:
        yield Collective(
            name=op.name,
            kind=kind,
            dtype=shape.dtype,
            buffer_bytes=shape.bytes,
            wire_bytes=shape.bytes * SENT[kind](size),
            group_size=size,
            groups=groups,
            count=1,
            arrays=1,
            is_async=False,
            in_branch=False,
            op_name="",
        )


def _groups(op: ir.Operation, kind: str, named: Mapping[str, ir.Operation]) -> DeviceGroups:
    if kind == "collective-permute":
        pairs = np.asarray(op.attributes["source_target_pairs"]).tolist()
        return connected([(source, target) for source, target in pairs])
    ragged: Any = op.attributes["backend_config"] if kind == "ragged-all-to-all" else None
    stated = (op.attributes if ragged is None else ragged)["replica_groups"]
    text = str(stated)
    if "replica_group_mesh_axes" not in text:  # jax 0.10
        rows = np.asarray(stated).tolist()
        return tuple(tuple(device for device in row if device >= 0) for row in rows)
    (mesh,) = re.findall(r"mesh = @(\w+)", text)
    return replica_groups(f"{_mesh(str(named[mesh].attributes['mesh']))} {{{_axes(text)}}}")


def _mesh(text: str) -> str:
    """HLO's form of `#sdy.mesh<["a"=2, "b"=4], device_ids=[...]>`."""
    axes = ",".join(f"'{name}'={size}" for name, size in re.findall(r'"(\w+)"=(\d+)', text))
    ids = re.search(r"device_ids=\[(.*?)\]", text)
    return f"mesh[{axes}]" + (f", device_ids=({ids[1]})" if ids else "")


def _axes(text: str) -> str:
    """HLO's form of `#stablehlo.axis_ref<name = "a">` lists, sub-axes included."""
    axes = re.findall(r'name = "(\w+)"(?:[^"]*?pre_size = (\d+), size = (\d+))?', text)
    return ",".join(f"'{a}'" + (f":({pre}){size}" if size else "") for a, pre, size in axes)


def _shape(value: ir.Value) -> Shape:
    match = _TENSOR.fullmatch(str(value.type))
    assert match is not None, f"a collective moves arrays, and this is a {value.type}"
    dims, dtype = match.groups()
    letters = dtype.rstrip("0123456789")
    dtype = _DTYPES.get(dtype) or _DTYPES.get(letters, letters) + dtype[len(letters) :]
    return Shape(dtype.lower(), tuple(map(int, dims.split("x")[:-1])))


def _turns(loop: ir.Operation) -> int:
    """Trip count of a `while` with a counter that adds a constant up to a constant bound."""
    condition, body = (region.blocks[0] for region in loop.regions)
    test: Any = _returns(condition)[0].owner  # an operation, or the block whose argument it is
    if getattr(test, "name", "") == "stablehlo.compare":
        counter, bound = test.operands
        numbers = [i for i, value in enumerate(condition.arguments) if value == counter]
        for number in numbers:
            step = _added(_returns(body)[number], body.arguments[number])
            first, last = _constant(loop.operands[number]), _constant(bound)
            counts_up = "LT" in str(test.attributes["comparison_direction"])
            if counts_up and step and first is not None and last is not None:
                return max(0, -(-(last - first) // step))
    raise ValueError(
        "a loop of the lowered program has no trip count that it states; what is inside it cannot "
        "be counted. Use lax.scan or fori_loop with a static length"
    )


def _returns(block: ir.Block) -> list[ir.Value]:
    *_, last = block.operations
    return list(last.operation.operands)


def _added(value: ir.Value, counter: ir.Value) -> int | None:
    """The constant, if `value` is `counter + constant`; else None."""
    operation: Any = value.owner
    if getattr(operation, "name", "") != "stablehlo.add" or operation.operands[0] != counter:
        return None
    return _constant(operation.operands[1])


def _constant(value: ir.Value) -> int | None:
    operation: Any = value.owner
    if getattr(operation, "name", "") != "stablehlo.constant":
        return None
    return int(np.asarray(operation.attributes["value"]).item())


def _text(attribute: ir.Attribute) -> str:
    named: Any = attribute  # of a string, or a symbol
    return named.value
