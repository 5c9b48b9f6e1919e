"""An experiment on a mesh, with a choice made for everything that it leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.defaults import default_collectives
from jaxtrain.context.choice import Heads, Method, choose
from jaxtrain.experiment.fields import Experiment
from jaxtrain.experiment.platform_kernels import with_kernels
from jaxtrain.experiment.tuning import adapters_of
from jaxtrain.mesh.compiler_options import with_defaults
from jaxtrain.mesh.head_chunk import LEAST_CHUNK, chunk_tokens_of
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.mesh.roles import Roles, roles_of
from jaxtrain.mesh.sharding import ways
from jaxtrain.models.adapters import Adapters
from jaxtrain.models.buffers import Buffers, buffers_of
from jaxtrain.models.check import sound_description
from jaxtrain.models.description import ModelDescription
from jaxtrain.models.layered import ModelConfig
from jaxtrain.operations.attention import AttentionCall
from jaxtrain.operations.block import attentions


@dataclass(frozen=True)
class Resolved:
    """An experiment on a mesh, with a choice made for everything that it leaves open.
    `jaxtrain.validation` says whether it can run.

    experiment: with kernels of the platform; all else depends on it, so another one is resolved
    anew. sizes: of mesh axes of size > 1, in mesh order. description: of the model with its
    objective; None if it has none, or it or the model's fields are wrong.
    """

    experiment: Experiment
    spec: MeshSpec
    sizes: Mapping[str, int]
    description: ModelDescription | None

    @property
    def described(self) -> ModelDescription:
        """The model's description; the model must have one."""
        assert self.description is not None, "asked for of a model that does not describe itself"
        return self.description

    def can(self, ability: str) -> bool:
        """Returns True if the model has the ability, or describes itself and is wrong, which is
        reported elsewhere."""
        if self.description is None:
            return isinstance(self.experiment.model, ModelConfig)
        return ability in self.description.can

    @property
    def mode(self) -> str:
        """The mode of execution: "explicit" if none is given and the model can."""
        return self.experiment.execution.mode or ("explicit" if self.can("explicit") else "gspmd")

    @cached_property
    def roles(self) -> Roles:
        """Mesh axes by what they split in use."""
        return roles_of(self.experiment.sharding.activations, self.sizes)

    @property
    def row_ways(self) -> int:
        """Number of devices over which a row is split."""
        return ways(self.roles.seq, self.sizes)

    @cached_property
    def _configured_adapters(self) -> tuple[Adapters | None, list[str]]:
        return adapters_of(self.experiment.lora, self.description)

    @property
    def adapters(self) -> Adapters | None:
        """Adapters beside the model's matrices; None without, or if they have violations."""
        adapters, violations = self._configured_adapters
        return None if violations else adapters

    @property
    def adapter_violations(self) -> list[str]:
        """Violations of the configured adapters."""
        return self._configured_adapters[1]

    @cached_property
    def buffers(self) -> Buffers:
        """Leaves among the parameters that no optimizer updates."""
        products = self.experiment.precision.products
        scaled = products is not None and products.scaling is not None
        return buffers_of(self.description, scaled=scaled)

    @property
    def collectives(self) -> Collectives:
        return self.experiment.execution.collectives or default_collectives(self.spec)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """The mesh's compiler options and those of `mesh.compiler_options`."""
        products = self.experiment.precision.products
        fp8 = products is not None and products.rate == "fp8"
        return with_defaults(dict(self.spec.compiler_options), self.spec.platform, fp8=fp8)

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits exist at one time: the model's setting, else the chip's default."""
        model = self.description
        if model is not None and model.head.chunk_tokens is not None:
            return model.head.chunk_tokens
        if model is None or self.spec.simulated:
            return LEAST_CHUNK
        local_vocab = model.head.padded // ways(self.roles.vocab, self.sizes)
        return chunk_tokens_of(self.spec.chip, local_vocab)

    @property
    def peak_flops(self) -> float:
        """Dense peak of one device in the compute dtype, FLOP/s."""
        return self.spec.chip.peak_flops(jnp.dtype(self.experiment.precision.compute).name)

    @property
    def product_flops(self) -> float:
        """Dense peak of one device in the products of layers, FLOP/s: the 8-bit rate if the
        products are in 8 bits and the chip has one."""
        products = self.experiment.precision.products
        rate = None if products is None else getattr(self.spec.chip, f"{products.rate}_flops")
        return self.peak_flops if rate is None else rate

    def local_heads(self) -> dict[Heads, AttentionCall]:
        """Returns, for each kind of block, a device's share of the attention heads and the full
        attention. Outside a pipeline its heads are split over the stages too. Heads that do not
        split are reported elsewhere."""
        model, parts = self.described, dict[Heads, AttentionCall]()
        outside = (*model.prefix.values(), *model.suffix.values())
        for blocks, roles in ((model.period, self.roles), (outside, self.roles.outside_stack())):
            of_q, of_k = ways(roles.heads, self.sizes), ways(roles.kv_heads, self.sizes)
            for call in (call for block in blocks for call in attentions(block)):
                heads = max(call.heads // of_q, 1), max(call.kv_heads // of_k, 1)
                parts.setdefault(Heads(*heads, call.causal), call)
        return parts

    def context_method(self, seq: int | None) -> Method:
        """Returns the experiment's method for attention over split rows of `seq` tokens, or the one
        that suits mesh and heads."""
        method = self.experiment.execution.context
        return choose(self.local_heads(), self.row_ways, seq) if method is None else method


def resolve(
    experiment: Experiment, spec: MeshSpec, sizes: Mapping[str, int] | None = None
) -> tuple[Resolved, list[str]]:
    """Returns the experiment on a mesh, and violations that keep its model from being built.
    sizes: of mesh axes of size > 1, None for the mesh's own."""
    if sizes is None:
        sizes = {axis: n for axis, n in spec.shape.items() if n > 1}
    description, violations = sound_description(experiment.model)
    if description is not None and experiment.objective is not None:
        description = description.with_preferences()
    if isinstance(experiment.model, ModelConfig):
        experiment = with_kernels(experiment, spec.platform, spec.chip.capability)
    return Resolved(experiment, spec, sizes, description), violations
