"""What a step makes of what it has counted: metrics of its routers, and the next of the leaves
that no optimizer moves."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.vary import same, vary
from jaxtrain.mesh.sharding import STAGE, partition_spec
from jaxtrain.models.routers import TALLY, next_biases, routers
from jaxtrain.models.scales import next_scales
from jaxtrain.moe.tally import BESIDE_LOADS
from jaxtrain.nn.bundle import LeafSplits, gather_bundle
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import params_in_natural_order


def next_buffers(
    assembly: Assembly, params: Mapping[str, jax.Array], grads: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Delayed scales and routers' biases after a step."""
    products, scales = assembly.experiment.precision.products, assembly.buffers.scales
    found = next_scales(params, grads, scales, products)
    return found | next_biases(params, grads, assembly.description)


def _of_all_stages(
    assembly: Assembly, mesh: jax.sharding.Mesh, tallies: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """Tallies that rest on the stages of their layers, on all of them: by one gather."""
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
    """Of a step whose tallies are in `grads`; count: what its loss is divided by.

    For each layer of number n: layer_n/expert_load, [experts], 1 where loads are even;
    layer_n/dropped, the part of choices that no expert took; layer_n/router_entropy, in nats. Of
    all together: expert_load_max, and the means dropped, router_entropy, router_z_loss and, where
    it has a weight, balance_loss.
    """
    if assembly.description is None:
        return {}
    counted = {k: g for k, g in grads.items() if k in assembly.buffers.tallies}
    tallies = _of_all_stages(assembly, mesh, counted)
    tallies = params_in_natural_order(assembly, tallies)
    every, found = [], {}
    for name, call in routers(assembly.described):
        if name + TALLY not in tallies:
            continue  # below all that is trained nothing is counted
        path, tally = name.removesuffix(call.router.leaf), tallies[name + TALLY] / count
        of_layers = tally.reshape(-1, call.experts + len(BESIDE_LOADS))
        for n, numbers in zip(assembly.described.layers_at(path), of_layers, strict=True):
            loads = numbers[: call.experts] * call.experts / call.per_token
            beside = dict(zip(BESIDE_LOADS, numbers[call.experts :], strict=True))
            beside["dropped"] = beside["dropped"] / call.per_token
            found[f"layer_{n}/expert_load"] = loads
            found[f"layer_{n}/dropped"] = beside["dropped"]
            found[f"layer_{n}/router_entropy"] = beside["entropy"]
            every.append({**beside, "load": jnp.max(loads)})
    if not every:
        return {}
    mean = {k: jnp.mean(jnp.stack([each[k] for each in every])) for k in every[0]}
    found |= {
        "expert_load_max": jnp.max(jnp.stack([each["load"] for each in every])),
        "dropped": mean["dropped"],
        "router_entropy": mean["entropy"],
        "router_z_loss": mean["z"],
    }
    # Without its gradient the loads it is made of are not added up over devices.
    counted = assembly.described.balances_microbatches
    return found | ({"balance_loss": mean["balance"]} if counted else {})
