"""What a TPU's compiler makes of communication alongside computation: read from its schedules for
chips that are not here."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.recursive import Recursive
from jaxtrain.overlap.alongside import alongside
from jaxtrain.telemetry.overlap import overlaps, tally
from tests.absent_tpu import for_tpu, no_cache, tpu

F = "fsdp"
MACHINES = {"v5e": ("meshes/v5e_16.toml", "2x2"), "v5p": ("meshes/v5p_512.toml", "2x2x1")}
WIDTH = 2048


def layer(x, w):
    """Three products of 2048 rows, 2048 by 2048."""
    return jnp.tanh(jnp.tanh(x @ w) @ w) @ w


def communicate(shard, gradient):
    """Two hops each: a gather's of 1 and 2 tiles of 512 rows, a scatter's of 2 and 1."""
    by = Recursive()
    return by.all_gather(shard, (F,), 0), by.reduce_scatter(gradient, (F,), 1)


def tied(x, w, shard, gradient):
    return alongside((layer, (x, w)), (communicate, (shard, gradient)), flops_per_byte=0.0)


def untied(x, w, shard, gradient):
    return layer(x, w), communicate(shard, gradient)


def hops(monkeypatch, machine, function):
    shapes = [((4 * 2048, WIDTH), P(F)), ((WIDTH, WIDTH), P()), ((WIDTH, WIDTH), P(F))]
    gradient = ((4 * WIDTH, WIDTH), P(F))
    out = (P(F), (P(F), P(F)))
    text = for_tpu(monkeypatch, *MACHINES[machine], F, function, *shapes, gradient, out=out)
    return tally(overlaps(text))["collective-permute"]


@tpu
@no_cache
@pytest.mark.parametrize("machine", MACHINES)
def test_every_hop_hides_behind_a_product(monkeypatch, machine) -> None:
    found = hops(monkeypatch, machine, tied)
    assert found.count == found.asynchronous == found.hidden == 4
    assert found.wire_bytes == 2 * 3 / 4 * WIDTH * WIDTH * 2


@tpu
@no_cache
def test_left_to_the_compiler_they_stand_before_the_first(monkeypatch) -> None:
    found = hops(monkeypatch, "v5p", untied)
    assert found.count == 4 and found.hidden < 4
