"""What the step of an assembly sends, as its contract is given it."""

from __future__ import annotations

from typing import Any

from jaxtrain.contract.contract import Contract, contract
from jaxtrain.mesh.mesh import MeshSpec, make_mesh
from jaxtrain.planner.assembled import steady
from jaxtrain.program.collectives import Collective, collectives
from jaxtrain.program.order import side_by_side
from jaxtrain.program.stablehlo import lowered_collectives
from jaxtrain.program.text import program_text
from jaxtrain.step.assembly import active_mesh
from jaxtrain.step.state import shardings
from jaxtrain.step.train_step import trace_step


def traced(assembly: Any, spec: MeshSpec | None = None) -> Any:
    """The step of a run's last steps, before it is lowered. spec: of devices that are here, where
    those of the assembly are not."""
    mesh = active_mesh(make_mesh(spec or assembly.spec), assembly.sizes)
    where = shardings(assembly.abstract, assembly.splits, mesh)
    return trace_step(assembly, mesh, where, choice=steady(assembly))


def lowered(assembly: Any, spec: MeshSpec | None = None) -> Any:
    """The same, before it is compiled."""
    return traced(assembly, spec).lower()


def programs(assembly: Any) -> tuple[list[Collective], list[Collective]]:
    """Collectives as they are handed to XLA, and as compiled: one after another, where XLA:CPU
    would not keep them apart."""
    before = lowered(assembly)
    compiled = before.compile(compiler_options=assembly.compiler_options or None)
    text = program_text(compiled)
    assert not side_by_side(text), side_by_side(text)
    return lowered_collectives(before), collectives(text)


def held(assembly: Any) -> Contract:
    """The contract of an assembly and its own step."""
    return contract(assembly, *programs(assembly))
