"""Leaves of delayed scales in a run: whose they are, what they begin with, and who moves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import Table

import jaxtrain
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.models.scales import first_scales
from jaxtrain.optim.precision import LossScale
from jaxtrain.planner.assembled import why_not_predicted
from jaxtrain.quantization import Delayed, Fp8Products
from jaxtrain.quantization.delayed import SCALES, scale_of
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.session.first_state import initialise
from jaxtrain.step.assembly import assemble

CURRENT = replace(jaxtrain.fp32, products=Fp8Products())
DELAYED = replace(jaxtrain.fp32, products=Fp8Products(Delayed(4)))


class Scaled(Table):
    """With a parameter of its own that is called as if it were such a leaf."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        super().__init__(rngs)
        self.outward_scales = nnx.Param(jnp.ones((8, 1)), axes=("embed", None))

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        self.outward[...] = self.outward[...] * self.outward_scales[...]
        return super().loss(batch, key=key)


def scaled(rngs: nnx.Rngs) -> Scaled:
    return Scaled(rngs)


def test_a_parameter_of_ones_own_may_be_called_so(
    own: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    """It is trained, averaged and counted as any."""
    given = replace(own, model=scaled, ema_decay=0.9, optimizer=jaxtrain.AdamW(1e-2))
    session = opened(given)
    name, before = "outward_scales", np.asarray(session.state.params["outward_scales"])
    stepped(session)
    assert not np.array_equal(session.state.params[name], before)
    assert name in session.state.ema
    paths = jax.tree_util.tree_leaves_with_path(session.state.optimizer)
    assert any(name in jax.tree_util.keystr(path) for path, _ in paths)
    spec = jaxtrain.mesh_from_axes(data=1)
    assert jaxtrain.check(given, spec).parameters == jaxtrain.check(own, spec).parameters + 8


def tables(state: Any) -> dict[str, jax.Array]:
    return {k: leaf for k, leaf in state.params.items() if k.endswith(SCALES)}


def scales(leaf: jax.Array, row: str) -> set[float]:
    return {float(scale_of(each, row)) for each in leaf.reshape(-1, leaf.shape[-1])}


@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_first_scales_are_those_that_the_first_step_finds(
    decoder: jaxtrain.Experiment, opened: Any, stepped: Any, scale: float | None
) -> None:
    """A step measures them, with scales by the tokens of a batch, 64 here, and by the loss scale;
    all else is as it was before, also where a run goes back to its beginning."""
    precision = replace(DELAYED, loss_scale=scale and LossScale(initial=scale))
    session = opened(replace(decoder, precision=precision))
    unmeasured = initialise(session.assembly, session.shardings)
    begun = 16 * (scale or 1.0) / (decoder.batch * 8)
    for name, leaf in tables(unmeasured).items():
        assert scales(leaf, "x") == {1.0}
        assert scales(leaf, "dy") == {2.0 ** math.ceil(math.log2(begun / 57344))}
        for row in ("x", "dy"):
            measured = scales(session.state.params[name], row)
            assert max(measured) < min(scales(leaf, row)), (name, row)
    (step, batch), *_ = session.loader.peek(1)
    (program,) = session.compiled.values()
    found, _ = program(unmeasured, batch)
    plain = initialise(session.assembly, session.shardings)
    expected = replace(plain, params={**plain.params, **tables(found)})
    assert step == 0 and same(session.state, expected)
    before = tables(jax.tree.map(np.asarray, session.state))
    stepped(session)
    for name, leaf in tables(session.state).items():
        for row in ("x", "w"):
            assert scales(leaf, row) == scales(before[name], row), "its own magnitudes"
    assert same(session.beginning_state(), expected)


def test_a_run_goes_back_to_its_beginning_after_steps_that_donate_it(
    decoder: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    session = opened(replace(decoder, precision=DELAYED))
    stepped(session)  # nothing reads its state before: a view of it would keep it from donation
    begins = session.beginning_state()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(begins))


def same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def test_they_count_in_fp32_whatever_parameters_are_kept_in(
    decoder: jaxtrain.Experiment,
) -> None:
    """bfloat16 takes 1024 - 1 for 1024: a history of 1024 steps would never end."""
    precision = replace(DELAYED, params=jnp.bfloat16)
    spec = jaxtrain.mesh_from_axes(data=1)
    assembly = assemble(replace(decoder, precision=precision), spec)
    found = {k: leaf.dtype for k, leaf in assembly.abstract.params.items()}
    for name, dtype in found.items():
        assert dtype == (jnp.float32 if name in assembly.buffers.scales else jnp.bfloat16), name


MOVED = {
    ("head",): (),
    ("suffix.0.mlp.*",): ("suffix",),
    ("period.*.mlp.up",): ("period", "suffix"),
    ("prefix.*",): ("prefix", "period", "suffix"),
    ("embedding",): ("prefix", "period", "suffix"),
}


@pytest.mark.parametrize("trainable", MOVED)
def test_those_are_moved_whose_outputs_have_a_gradient(
    decoder: jaxtrain.Experiment, trainable: tuple[str, ...]
) -> None:
    """No backward pass is made for them alone."""
    (block,) = decoder.model.period
    model = replace(decoder.model, prefix=(block,), suffix=(block,), layers=3, tied=False)
    tuning = jaxtrain.FineTuning(trainable=trainable)
    given = replace(decoder, model=model, precision=DELAYED, fine_tuning=tuning)
    assembly = assemble(given, jaxtrain.mesh_from_axes(data=2))
    moved = assembly.buffers.scales - assembly.frozen
    assert moved == {k for k in assembly.buffers.scales if k.startswith(MOVED[trainable])}
    assert bool(moved) == bool(MOVED[trainable]) and len(assembly.buffers.scales) == 3 * 7
    said = why_not_predicted(assembly)
    assert (said is None) == (moved == assembly.buffers.scales)


def test_products_without_a_gradient_have_scales_of_the_moment(
    decoder: jaxtrain.Experiment, opened: Any, stepped: Any
) -> None:
    """Nobody would move theirs."""
    tuning = jaxtrain.FineTuning(trainable=("head",))
    model = replace(decoder.model, tied=False)
    losses = {}
    for name, precision in (("delayed", DELAYED), ("current", CURRENT)):
        given = replace(decoder, model=model, precision=precision, fine_tuning=tuning)
        session = opened(given)
        losses[name] = [stepped(session)["loss"] for _ in range(2)]
    assert losses["delayed"] == losses["current"]


def test_averages_are_evaluated_by_scales_of_their_own(
    decoder: jaxtrain.Experiment, opened: Callable[..., Any], tmp_path: Path
) -> None:
    """Those of weights of a 64th would cut them off."""
    given = replace(decoder, precision=DELAYED, ema_decay=0.9)
    spec = jaxtrain.mesh_from_axes(fsdp=2)
    session = opened(given, fsdp=2)
    assembly, state = session.assembly, initialise(session.assembly, session.shardings)
    evaluator = Evaluator(assembly, make_mesh(spec), cache_dir=tmp_path)
    larger = {k: 64 * leaf for k, leaf in state.ema.items()}
    found = evaluator(replace(state, ema=larger), batches=1)
    whole = {**state.params, **larger}
    own = first_scales(whole, assembly.buffers.scales, DELAYED.products)
    where = {k: leaf.sharding for k, leaf in state.params.items()}
    placed = {k: jax.device_put(leaf, where[k]) for k, leaf in own.items()}
    assert evaluator(replace(state, params=placed, ema={}), batches=1) == found
    cut_off = evaluator(replace(state, params=whole, ema={}), batches=1)
    assert cut_off["eval_loss"] != found["eval_loss"]
