"""Metrics of a step's routers, and the next values of the leaves that no optimizer moves."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.vary import same, vary
from jaxtrain.mesh.axes import STAGE
from jaxtrain.mesh.sharding import partition_spec
from jaxtrain.models.routers import TALLY, next_biases, routers
from jaxtrain.models.scales import next_scales
from jaxtrain.moe.tally import BESIDE_LOADS
from jaxtrain.nn.bundle import LeafSplits, gather_bundle
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import params_in_natural_order


def next_buffers(
    assembly: Assembly, params: Mapping[str, jax.Array], grads: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns delayed scales and routers' biases after a step."""
    products, scales = assembly.experiment.precision.products, assembly.buffers.scales
    updated = next_scales(params, grads, scales, products)
    return updated | next_biases(params, grads, assembly.description)


def _of_all_stages(
    assembly: Assembly, mesh: jax.sharding.Mesh, tallies: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Gathers tallies from the stages of their layers to all stages, by one gather."""
    split = {k: assembly.places[k].optimizer for k in tallies}
    staged = {k: dims for k, dims in split.items() if (STAGE,) in dims}
    over: LeafSplits = {k: (dims.index((STAGE,)), (STAGE,)) for k, dims in staged.items()}
    if not over:
        return tallies
    axes = tuple(assembly.sizes)

    def gathered(tallies: dict[str, jax.Array]) -> dict[str, jax.Array]:
        typed = {k: vary(x, axes) for k, x in tallies.items()}
        return {k: same(x, axes) for k, x in gather_bundle(typed, over, Lax()).items()}

    run = jax.shard_map(
        gathered,
        mesh=mesh,
        in_specs=({k: partition_spec(dims) for k, dims in split.items()},),
        out_specs=partition_spec(()),
        check_vma=assembly.check_vma,
    )
    return run(tallies)


def routing_metrics(
    assembly: Assembly,
    mesh: jax.sharding.Mesh,
    grads: Mapping[str, jax.Array],
    count: jax.Array,
) -> dict[str, jax.Array]:
    """Metrics of a step whose tallies are in `grads`. count: the loss's divisor.

    For each layer n: layer_n/expert_load, [experts], 1 where loads are even; layer_n/dropped, the
    share of choices that no expert took; layer_n/router_entropy, in nats. Over all layers:
    expert_load_max, and the means dropped, router_entropy, router_z_loss and, if it has a weight,
    balance_loss.
    """
    if assembly.description is None:
        return {}
    counted = {k: g for k, g in grads.items() if k in assembly.buffers.tallies}
    tallies = _of_all_stages(assembly, mesh, counted)
    tallies = params_in_natural_order(assembly, tallies)
    layers, metrics = [], {}
    for name, call in routers(assembly.described):
        if name + TALLY not in tallies:
            continue  # a router below all trained leaves is not counted
        path, tally = name.removesuffix(call.router.leaf), tallies[name + TALLY] / count
        of_layers = tally.reshape(-1, call.experts + len(BESIDE_LOADS))
        for n, numbers in zip(assembly.described.layers_at(path), of_layers, strict=True):
            loads = numbers[: call.experts] * call.experts / call.per_token
            statistics = dict(zip(BESIDE_LOADS, numbers[call.experts :], strict=True))
            statistics["dropped"] = statistics["dropped"] / call.per_token
            metrics[f"layer_{n}/expert_load"] = loads
            metrics[f"layer_{n}/dropped"] = statistics["dropped"]
            metrics[f"layer_{n}/router_entropy"] = statistics["entropy"]
            layers.append({**statistics, "load": jnp.max(loads)})
    if not layers:
        return {}
    mean = {k: jnp.mean(jnp.stack([layer[k] for layer in layers])) for k in layers[0]}
    metrics |= {
        "expert_load_max": jnp.max(jnp.stack([layer["load"] for layer in layers])),
        "dropped": mean["dropped"],
        "router_entropy": mean["entropy"],
        "router_z_loss": mean["z"],
    }
    # Only a balance loss with a gradient has loads that are summed over devices.
    counted = assembly.described.balances_microbatches
    return metrics | ({"balance_loss": mean["balance"]} if counted else {})
