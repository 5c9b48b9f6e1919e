"""Low-rank adapters of experts, of their router and of the shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain.models.adapters import Adapters, adapter_places, merge_adapters
from jaxtrain.models.build import build_model
from jaxtrain.moe import SigmoidRouter
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import put_together, take_apart
from jaxtrain.quantization.crossing import each
from jaxtrain.transformer import SharedExpert
from jaxtrain.transformer.place import Context

EMBED, TOKENS, RANK, SCALE = 12, 24, 3, 1.7
MIXTURE = jaxtrain.MoeConfig(8, experts=4, shared=SharedExpert(10), router=SigmoidRouter(bias=True))
KINDS = {"gated": MIXTURE, "without a gate, one of each": replace(MIXTURE, gated=False)}


def module_of(mixture: jaxtrain.MoeConfig) -> Any:
    """The mixture's module outside the stack, without arrays, each matrix with an adapter; those
    in the stack have the same leaves."""
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(2), mixture)
    config = jaxtrain.DecoderConfig(
        vocab=8, embed=EMBED, layers=2, period=(block,), prefix=(block,), vocab_multiple=8
    )
    adapters = Adapters(RANK, SCALE, tuple(adapter_places(config.describe())))
    model = nnx.eval_shape(lambda: build_model(config, jax.random.key(0), adapters=adapters))
    stacked, whole = (take_apart(part[0].mlp).params for part in (model.period, model.prefix))
    assert {k: v.shape[1:] for k, v in stacked.items()} == {k: v.shape for k, v in whole.items()}
    return model.prefix[0].mlp


def made(mixture: jaxtrain.MoeConfig) -> tuple[Any, dict[str, jax.Array], jax.Array, jax.Array]:
    """(static form of a mixture, its parameters, x, dy): each matrix has an adapter, none is 0."""
    whole = take_apart(module_of(mixture))
    rng = np.random.default_rng(0)
    params = {
        k: jnp.asarray(0.5 * rng.normal(size=v.shape), jnp.float32) for k, v in whole.params.items()
    }
    names = {k.removesuffix("_lora_a") for k in params if k.endswith("_lora_a")}
    matrices = {k for k, v in params.items() if v.ndim > 1 and "_lora" not in k}
    assert names == matrices, "every matrix has one"
    x, dy = (jnp.asarray(rng.normal(size=(TOKENS, EMBED)), jnp.float32) for _ in range(2))
    return whole.static, params, x, dy


def out(static: Any, params: dict[str, jax.Array], x: jax.Array, chunk: int | None) -> jax.Array:
    context = Context(jnp.zeros((1, TOKENS), jnp.int32), None, (), None)
    return put_together(static, params)(x, context, Local(expert_chunk=chunk))


def cut(params: dict[str, jax.Array], ending: str) -> dict[str, jax.Array]:
    return {k: jnp.zeros_like(v) if k.endswith(ending) else v for k, v in params.items()}


@pytest.mark.parametrize(("name", "chunk"), [(name, 8 * i or None) for i, name in enumerate(KINDS)])
def test_merged_is_what_is_used_and_zeros_change_nothing(name: str, chunk: int | None) -> None:
    static, params, x, _ = made(KINDS[name])
    merged = cut(merge_adapters(params, SCALE), "_lora_b")
    run = jax.jit(lambda params: out(static, params, x, chunk))
    used, wanted, without = map(run, (params, merged, cut(params, "_lora_b")))
    np.testing.assert_allclose(used, wanted, rtol=2e-5, atol=2e-5)
    assert np.abs(used - without).max() > 0.1, "adapters do something"
    np.testing.assert_array_equal(without, run(cut(cut(params, "_lora_a"), "_lora_b")))


def test_adapters_are_split_as_their_logical_axes_are() -> None:
    """In a shard_map over experts and hidden units: what has neither is whole there."""
    static, params, _, _ = made(MIXTURE)
    axes, leaves = take_apart(module_of(MIXTURE)).axes, put_together(static, params)._leaves()
    names, seen = {id(v): k for k, v in params.items()}, []

    def check(leaf: jax.Array, split: Any) -> None:
        name = names[id(leaf)]
        seen.append(name)
        of = {"mlp": ("tensor",), "experts": ("expert",) if len(axes[name]) == 3 else ()}
        assert split == tuple(of.get(str(axis), ()) for axis in axes[name]), name

    each(check, leaves, leaves.splits(("tensor",), ("expert",)))
    assert sorted(seen) == sorted(params)


@pytest.mark.parametrize("chunk", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_change_by_the_chain_rule(chunk: int | None) -> None:
    """Of w' = w + s A B: dA = s dw' B^T and dB = s A^T dw'. And dx is that of w'."""
    static, params, x, dy = made(MIXTURE)

    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(out(static, params, x, chunk) * dy)

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    merged = cut(merge_adapters(params, SCALE), "_lora_b")
    (found, dx), (dense, wanted) = grad(params, x), grad(merged, x)
    np.testing.assert_allclose(dx, wanted, rtol=0, atol=1e-4)
    for name in (k.removesuffix("_lora_a") for k in params if k.endswith("_lora_a")):
        a, b, dw = params[f"{name}_lora_a"], params[f"{name}_lora_b"], dense[name]
        for ending, rule in (("a", dw @ b.swapaxes(-1, -2)), ("b", a.swapaxes(-1, -2) @ dw)):
            of = found[f"{name}_lora_{ending}"]
            size = np.abs(SCALE * rule).max()
            assert size > 1e-3
            np.testing.assert_allclose(of, SCALE * rule, rtol=0, atol=1e-4 * size, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gspmd", "explicit"])
def test_steps_on_a_mesh_are_those_of_one_device(
    mode: str,
    decoder: jaxtrain.Experiment,
    opened: Callable[..., Any],
    stepped: Callable[..., Any],
) -> None:
    """Experts apart and their hidden units cut; in the second step no B is zero."""
    (block,) = decoder.model.period
    mixture = replace(MIXTURE, router=SigmoidRouter())
    model = replace(decoder.model, period=(replace(block, mlp=mixture),))
    tuning = jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0, targets=("*.mlp.*",)))
    given = replace(decoder, model=model, optimizer=jaxtrain.SGD(0.5), fine_tuning=tuning)
    execution = replace(given.execution, mode=mode)
    cut = opened(replace(given, execution=execution), data=2, expert=2, tensor=2)
    one = opened(given)
    for _ in range(3):
        wanted, found = stepped(one), stepped(cut)
        for name in ("loss", "grad_norm"):
            np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5, err_msg=name)
