"""What a TPU's compiler makes of communication alongside computation: read from its schedules for
chips that are not here."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.recursive import Recursive
from jaxtrain.overlap.alongside import alongside
from jaxtrain.program.overlap import overlaps, tally
from tests.absent_tpu import estimated_kernels, for_tpu, no_cache, tpu

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


PROGRAMS: dict[tuple[str, str], str] = {}


def program(monkeypatch, machine, function):
    """The compiled text, of one compilation."""
    key = (machine, function.__name__)
    if key not in PROGRAMS:
        shapes = [((4 * 2048, WIDTH), P(F)), ((WIDTH, WIDTH), P()), ((WIDTH, WIDTH), P(F))]
        gradient, out = ((4 * WIDTH, WIDTH), P(F)), (P(F), (P(F), P(F)))
        chip = MACHINES[machine]
        PROGRAMS[key] = for_tpu(monkeypatch, *chip, F, function, *shapes, gradient, out=out)
    return PROGRAMS[key]


def hops(monkeypatch, machine, function):
    return tally(overlaps(program(monkeypatch, machine, function)))["collective-permute"]


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


@tpu
@no_cache
@pytest.mark.parametrize("machine", MACHINES)
def test_the_roofline_of_each_kernel_is_below_the_compilers_estimate(monkeypatch, machine) -> None:
    """So that the MFU it allows is a bound; and the products' is near it, by the chip's clock."""
    kernels = estimated_kernels(program(monkeypatch, machine, tied), f"tpu_{machine}")
    assert all(roofline.seconds < estimate for roofline, estimate in kernels.values())
    products = [(r.seconds, e) for r, e in kernels.values() if r.seconds > r.memory_bound_s]
    assert len(products) >= 3 and all(least > 0.8 * estimate for least, estimate in products)
