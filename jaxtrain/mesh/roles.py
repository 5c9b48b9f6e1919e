"""Mesh axes by what they split while a step runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from jaxtrain.mesh.axes import EXPERT_AXES, STAGE, TENSOR_PARALLEL, MeshAxes


class Roles(NamedTuple):
    """For each of these logical axes, the mesh axes of more than one device that split it in use.

    In the explicit mode heads, kv_heads, mlp and vocab have the same ones (`validation.split`).
    """

    batch: MeshAxes = ()
    seq: MeshAxes = ()
    heads: MeshAxes = ()
    kv_heads: MeshAxes = ()
    mlp: MeshAxes = ()
    vocab: MeshAxes = ()
    experts: MeshAxes = ()
    layers: MeshAxes = ()

    @property
    def stream(self) -> MeshAxes:
        """Mesh axes over which the explicit mode splits the tokens between layers: a layer gathers
        them before its products (sequence parallelism, Korthikanti et al. 2022)."""
        return self.heads

    def outside_stack(self) -> Roles:
        """Returns the roles outside a pipeline's stack, in which all stages work on the same
        microbatch: what `tensor` splits is split over the stages too."""
        both = {name: (*getattr(self, name), *self.layers) for name in TENSOR_PARALLEL}
        return self._replace(**both)


def roles_of(activations: Iterable[tuple[str, MeshAxes]], sizes: Mapping[str, int]) -> Roles:
    """Returns the roles of mesh axes.

    activations: the sharding rules' table of activations. sizes: of the mesh axes.
    """
    table = dict(activations)
    table |= {"experts": EXPERT_AXES, "layers": (STAGE,)}
    return Roles(
        **{
            name: tuple(axis for axis in table.get(name, ()) if sizes.get(axis, 1) > 1)
            for name in Roles._fields
        }
    )
