"""Least seconds of a step against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

import jaxtrain
from jaxtrain.mesh.hardware import CHIPS, LINKS
from jaxtrain.mesh.mesh import load_mesh
from jaxtrain.planner.seconds import step_seconds
from jaxtrain.step.assembly import assemble
from tests.two_hosts import two_hosts

BLOCK = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=4), jaxtrain.MlpConfig(hidden=64))


def experiment(**fields):
    usual = dict(
        model=jaxtrain.DecoderConfig(vocab=512, embed=32, layers=2, period=(BLOCK,)),
        data=jaxtrain.TextData(jaxtrain.data.StdlibSource(), jaxtrain.data.ByteTokenizer(), seq=64),
        optimizer=jaxtrain.AdamW(1e-3),
        steps=10,
        batch=16,
        sharding=jaxtrain.data_parallel(),
    )
    return jaxtrain.Experiment(**(usual | fields))


def test_data_parallelism_takes_one_all_reduce_of_all_gradients():
    made = assemble(experiment(), two_hosts(dict(data=16)))
    found = step_seconds(made)
    parameters = sum(place.local_size({}) for place in made.places.values())
    ((axes, link), (sent, seconds)), *others = found.communication.items()
    assert (axes, link) == (("data",), "infiniband_ndr") and not others
    assert 2 * 15 / 16 * 4 * parameters == pytest.approx(sent, rel=1e-4)  # and a few norms
    assert seconds == pytest.approx(sent / (LINKS["infiniband_ndr"].bandwidth_gbytes * 1e9))


def test_matmuls_take_six_flops_a_weight_and_token_and_half_of_attention():
    made = assemble(experiment(), two_hosts(dict(data=16)))
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 512
    tokens, pairs = 16 * 64, 16 * 64 * 65 / 2
    flops = 6 * matrices * tokens + 2 * 12 * 32 * pairs
    peak = CHIPS["h100_sxm"].fp32_flops * 16
    assert step_seconds(made).compute_s == pytest.approx(flops / peak)


def test_what_is_not_known_is_not_told():
    gspmd = experiment(execution=jaxtrain.Execution(mode="gspmd"))
    found = step_seconds(assemble(gspmd, two_hosts(dict(data=16))))
    assert found.communication is None and "`compile` tells" in found.summary()
    simulated = replace(load_mesh("h100_8"), simulated=True)
    assert step_seconds(assemble(experiment(), simulated)) is None
    assert step_seconds(assemble(experiment(), two_hosts(dict(data=16), links=()))) is None
    alone = two_hosts(dict(data=1), devices=1, devices_per_host=1, links=())
    assert step_seconds(assemble(experiment(), alone)).communication_s == 0
