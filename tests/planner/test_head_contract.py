"""The table of a head that is not tied to the embedding travels beside the last layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from programs import held, traced
from test_contract import EXPERIMENT, assembled, told

import jaxtrain
from jaxtrain.certificate.layouts import Layout
from jaxtrain.certificate.shrink import shrink
from jaxtrain.collectives import Collectives, Lax, Recursive
from jaxtrain.nn.stack import Layers
from tests.permutes import bodies, tied_permutes


def on_four(by=Recursive(), *, tied=False, trainable=None):  # noqa: B008 (frozen)
    """A step of a small decoder on four devices; by: what moves its weights."""
    small = shrink(jaxtrain.load_experiment(EXPERIMENT), devices=8)
    tuning = jaxtrain.FineTuning(trainable=trainable)
    small = replace(small, model=replace(small.model, tied=tied), fine_tuning=tuning)
    layout = Layout((("fsdp", 4),), loop="scanned, prefetch, remat full", microbatches=1)
    assembly = assembled(layout, small)
    execution = replace(assembly.experiment.execution, collectives=Collectives(by))
    return replace(assembly, experiment=replace(assembly.experiment, execution=execution))


def tied_permutes_of(assembly):
    jaxpr = traced(assembly).jaxpr.jaxpr
    return sum(len(tied_permutes(equations)) for equations in bodies(jaxpr))


@pytest.mark.parametrize(
    ("trainable", "hops"), [(None, 2 + 2), (("period.*",), 2)], ids=["trained", "frozen"]
)
def test_its_hops_are_tied_to_products_and_predicted(trainable, hops):
    """Two on four devices, and two of its gradient; none of that where it is frozen."""
    untied, tied = (on_four(tied=each, trainable=trainable) for each in (False, True))
    assert tied_permutes_of(untied) - tied_permutes_of(tied) == hops
    found = held(untied)
    assert not found.broken, told(found.broken)


@pytest.mark.parametrize(("by", "names"), [(Recursive(), {"head"}), (Lax(), set())])
def test_a_compiler_that_orders_gathers_has_it_where_it_is_used(monkeypatch, by, names):
    seen, with_tables = set(), Layers.with_tables

    def noted(self, params, x, extras, tables):
        seen.update(tables)
        return with_tables(self, params, x, extras, tables)

    monkeypatch.setattr(Layers, "with_tables", noted)
    traced(on_four(by))
    assert seen == names
