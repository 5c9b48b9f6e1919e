"""Hops in a loop, as accelerators take them: XLA has that branch of `platform_dependent` for others
than CPUs, so it is chosen here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives import ring
from jaxtrain.collectives.ring import LEFT, RIGHT, Ring

AXES = ("data",)


@pytest.fixture
def looped(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """The loops that were taken."""
    taken: list[Callable[..., Any]] = []

    def accelerator(*operands: Any, cpu: Any, default: Any) -> Any:
        taken.append(default)
        return default(*operands)

    monkeypatch.setattr(ring.lax, "platform_dependent", accelerator)
    return taken


CHAINS = [[(RIGHT, 3)], [(RIGHT, 2), (LEFT, 1)], [(RIGHT, 1), (LEFT, 3)], [(RIGHT, 2), (LEFT, 2)],
          [(RIGHT, 0), (LEFT, 0)]]  # fmt: skip


@pytest.mark.parametrize("chains", CHAINS, ids=str)
def test_a_loop_makes_the_hops_of_every_chain_in_turn(chains: Any, looped: Any) -> None:
    """Each (way, number) once, a hop of each way side by side while it lasts."""
    most = max(hops for _, hops in chains)
    wanted = [way * h for h in range(1, most + 1) for way, hops in chains if h <= hops]

    def hop(carry: Any, way: int, h: Any) -> Any:
        log, count = carry
        return log.at[count].set(way * h), count + 1

    log, count = Ring(unroll=False).travel(chains, hop, (jnp.zeros(9, jnp.int32), jnp.int32(0)))
    assert bool(looped) is (most > 0)
    assert log[: int(count)].tolist() == wanted and int(count) == len(wanted)


def test_looped_collectives_are_the_dense_ones(looped: Any) -> None:
    """On four devices: one way has a hop more than the other."""
    n, by = 4, Ring(2, unroll=False)
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:n]), AXES, axis_types=(jax.sharding.AxisType.Auto,)
    )
    x = np.random.default_rng(0).integers(-9, 9, (n, 2 * n, 3)).astype(np.float32)

    def on_device(x: jax.Array) -> list[jax.Array]:
        x = x[0]
        results = [
            by.all_gather(x, AXES, 1),
            by.reduce_scatter(x, AXES, 0),
            by.all_to_all(x, AXES, 0, 1),
            by.scatter(x, AXES, 0, 1),
            by.gather(x, AXES, 1, 3),
        ]
        return [result[None] for result in results]

    mapped = jax.shard_map(on_device, mesh=mesh, in_specs=P(*AXES), out_specs=P(*AXES))
    quick = {"xla_backend_optimization_level": 0}
    results = jax.jit(mapped, compiler_options=quick)(x)
    side_by_side = np.concatenate(list(x), axis=1)
    tiles = x.reshape(n, n, 2, 3)
    wanted = [
        np.stack([side_by_side] * n),
        tiles.sum(0),
        np.stack([np.concatenate(list(tiles[:, device]), axis=1) for device in range(n)]),
        tiles[1],
        np.stack([side_by_side * (device == 3) for device in range(n)]),
    ]
    assert looped
    for result, dense in zip(results, wanted, strict=True):
        np.testing.assert_array_equal(result, dense)
