"""A mixture of feed-forward layers in place of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from jaxtrain.models.adapters import adapter
from jaxtrain.moe.layer import Activation, ExpertLayer, ExpertLeaves
from jaxtrain.moe.replay import OWN, Replay
from jaxtrain.moe.router import Balance, Capacity, Router, SoftmaxRouter
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.param import constant, named_key, normal
from jaxtrain.transformer.feed_forward import Mlp, MlpConfig, silu
from jaxtrain.transformer.place import Context, Place


@dataclass(frozen=True)
class SharedExpert:
    """A feed-forward layer beside the others, which every token goes through.

    hidden: its width; of several, theirs together. weighed: its output is multiplied by the sigmoid
    of a router of its own (Qwen2-MoE).
    """

    hidden: int
    weighed: bool = False


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of `experts` feed-forward layers, each as `MlpConfig` has one, of which every token
    goes through the `experts_per_token` that its router gives the most (Jiang et al. 2024).

    hidden, activation, gated: of each expert, as in `MlpConfig`. router: how experts are chosen and
    weighed. shared: what every token goes through beside them, None for nothing. capacity: how many
    tokens an expert takes; None: all that choose it, nothing is dropped. balance: what keeps loads
    even, None for nothing but the loss. kept_routing: tokens of a batch whose experts are kept in a
    leaf beside the router, and may be given there (`moe.replay`): for the certificate, else None.
    """

    hidden: int
    experts: int
    experts_per_token: int = 2
    activation: Activation = silu
    gated: bool = True
    router: Router = SoftmaxRouter()  # noqa: RUF009 (frozen)
    shared: SharedExpert | None = None
    capacity: Capacity | None = None
    balance: Balance | None = None
    kept_routing: int | None = None

    @property
    def replay(self) -> Replay | None:
        tokens, k = self.kept_routing, self.experts_per_token
        return None if tokens is None else Replay(self.router, tokens, k, self.experts)


class Moe(nnx.Module):
    router_tally: nnx.Param | None = None
    """Counts of a step (`moe.tally`), if the router has been given a tally."""

    def __init__(self, config: MoeConfig, place: Place, *, key: jax.Array) -> None:
        self.config = config
        embed, hidden, n = place.embed, config.hidden, config.experts
        std = place.init.matrix_std(embed, layers=place.layers)
        self.router = normal(key, "router", (embed, n), ("embed", "experts"), std=std)
        if config.router.bias:
            self.router_bias = constant(0.0, (n,), ("experts",))
        if config.replay is not None:
            self.router_replay = constant(float(OWN), (config.replay.size,), (None,))
        into = ("experts", "embed", "mlp")
        if config.gated:
            self.gate = normal(key, "gate", (n, embed, hidden), into, std=std)
        self.up = normal(key, "up", (n, embed, hidden), into, std=std)
        if config.shared is not None:
            shared = MlpConfig(config.shared.hidden, config.activation, config.gated)
            self.shared = Mlp(shared, place, key=named_key(key, "shared"))
            if config.shared.weighed:
                size = (embed, 1)
                self.shared_router = normal(key, "shared_router", size, ("embed", None), std=std)
        std = place.init.matrix_std(hidden, layers=place.layers, residual=True)
        self.down = normal(key, "down", (n, hidden, embed), ("experts", "mlp", "embed"), std=std)

    def __call__(self, x: jax.Array, context: Context, comm: Communicator) -> jax.Array:
        """x [tokens share, embed] -> same shape."""
        config = self.config
        # Generation adds single tokens: no others compete with them.
        alone = context.index is not None
        layer = ExpertLayer(
            config.experts_per_token,
            config.activation,
            config.router,
            None if alone else config.capacity,
            None if alone else config.balance,
            comm.grouped_matmul,
            next((part.lora_scale for part in self._parts if hasattr(part, "lora_scale")), 1.0),
        )
        return comm.experts(layer, x, self._leaves(), context.facts)

    @property
    def _parts(self) -> tuple[Any, ...]:
        """Modules with matrices, which may have adapters."""
        return (self,) if self.config.shared is None else (self, self.shared)

    def _leaves(self) -> ExpertLeaves:
        names = ("gate", "up", "down") if self.config.gated else ("up", "down")

        def one(name: str) -> jax.Array | None:
            leaf = getattr(self, name, None)
            return None if leaf is None else leaf[...]

        weights, *shared = (
            tuple(getattr(part, name)[...] for name in names) for part in self._parts
        )
        pairs_of_part = [tuple(adapter(part, name) for name in names) for part in self._parts]
        adapters, *of_shared = (pairs if any(pairs) else () for pairs in pairs_of_part)
        return ExpertLeaves(
            self.router[...],
            weights,
            one("router_bias"),
            one("router_tally"),
            one("router_replay"),
            shared[0] if shared else (),
            one("shared_router"),
            adapters,
            adapter(self, "router"),
            of_shared[0] if of_shared else (),
        )
