"""A mixture of experts: seconds of its grouped products by the platform's kernel, by the portable
loop and by JAX's own `ragged_dot`; each is checked against the dense sum over all experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxtrain.bench_gpu.layer import error, require
from jaxtrain.bench_gpu.setting import ExpertShape, Row, Setting
from jaxtrain.bench_gpu.timing import timed
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import GroupedMatmul
from jaxtrain.moe.layer import ExpertLayer, ExpertLeaves, Routed
from jaxtrain.moe.mosaic_blocks import MosaicBlocks

ExpertWeights = tuple[Float[Array, "experts _ _"], ...]
Layer = Callable[[jax.Array, jax.Array, ExpertWeights, int], jax.Array]
"""(x [tokens, embed], router [embed, experts], (gate, up, down), experts a token) -> as x."""


def ours(
    x: jax.Array,
    router: jax.Array,
    weights: ExpertWeights,
    k: int,
    *,
    kernel: GroupedMatmul | None = None,
) -> jax.Array:
    """The layer of our models; None selects the platform's kernel."""
    return ExpertLayer(k, jax.nn.silu, kernel=kernel)(x, ExpertLeaves(router, weights))


def route(x: jax.Array, router: jax.Array, k: int) -> Routed:
    """Returns the same choices and shares for all layers."""
    return ExpertLayer(k, jax.nn.silu).route(x, ExpertLeaves(router, ()))


def ragged(x: jax.Array, router: jax.Array, weights: ExpertWeights, k: int) -> jax.Array:
    """Rows in the order of experts, without padding, multiplied by `lax.ragged_dot`."""
    gate, up, down = weights
    shares, chosen = route(x, router, k)
    of_slot = chosen.reshape(-1)
    order = jnp.argsort(of_slot, stable=True)
    sizes = jnp.bincount(of_slot, length=len(down))
    rows = x[order // k]
    h = jax.nn.silu(lax.ragged_dot(rows, gate, sizes)) * lax.ragged_dot(rows, up, sizes)
    out = lax.ragged_dot(h, down, sizes)[jnp.argsort(order)].reshape(*chosen.shape, -1)
    return jnp.sum(out.astype(jnp.float32) * shares[..., None], axis=1).astype(x.dtype)


def dense(x: jax.Array, router: jax.Array, weights: ExpertWeights, k: int) -> jax.Array:
    """The oracle: every token through every expert, those not chosen times zero."""
    gate, up, down = weights
    shares, chosen = route(x, router, k)
    share = jnp.sum(jax.nn.one_hot(chosen, len(down)) * shares[..., None], axis=1)
    h = jax.nn.silu(jnp.einsum("te,xeh->txh", x, gate)) * jnp.einsum("te,xeh->txh", x, up)
    return jnp.einsum("txh,xhe,tx->te", h, down, share).astype(x.dtype)


LAYERS: dict[str, Layer] = {
    "jaxtrain": ours,
    "loop": partial(ours, kernel=BlockLoop()),
    "ragged_dot": ragged,
    "mosaic": partial(ours, kernel=MosaicBlocks()),
}


def measure(setting: Setting, name: str) -> None:
    """Reports errors of output and gradients at a small size, then seconds."""
    layer, sizes = LAYERS[name], setting.sizes
    if name == "mosaic":
        require(setting, MosaicBlocks())
    dtypes = (jnp.bfloat16,) if name == "mosaic" else (jnp.float32, jnp.bfloat16)
    for dtype in dtypes:
        row = {"row": f"checked {jnp.dtype(dtype).name}"}
        setting.tell(row | errors(layer, sizes.checked_experts, dtype))
    shape = sizes.experts
    arrays, dy = operands(shape, jnp.bfloat16)
    forward = jax.jit(lambda x, router, weights: layer(x, router, weights, shape.chosen))
    pulled = jax.jit(partial(_pulled, layer, shape.chosen))
    one_pass = timed(lambda: forward(*arrays), round_s=sizes.round_s)
    both_passes = timed(lambda: pulled(dy, *arrays), round_s=sizes.round_s)
    products = 3 * shape.chosen * shape.tokens * shape.embed * shape.hidden
    flops = 3 * 2 * products
    setting.tell(
        {
            "row": "layer",
            "forward_ms": one_pass.seconds * 1e3,
            "both_ms": both_passes.seconds * 1e3,
            "spread": both_passes.spread,
            "tflops": flops / both_passes.seconds / 1e12,
            "of_peak": setting.share(flops / both_passes.seconds),
        }
    )


def errors(layer: Layer, shape: ExpertShape, dtype: Any) -> Row:
    """Returns errors of the layer in `dtype` over the largest value of the dense sum's in fp32, for
    output and gradients."""
    inputs = operands(shape, dtype)
    fp32_inputs = jax.tree.map(lambda x: x.astype(jnp.float32), inputs)
    with jax.default_matmul_precision("highest"):
        results, expected = (
            jax.jit(partial(_pulled, function, shape.chosen))(dy, *arrays)
            for function, (arrays, dy) in ((layer, inputs), (dense, fp32_inputs))
        )
    names = ("y", "dx", "drouter", "dgate", "dup", "ddown")
    pairs = zip(names, jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    return {f"{name}_error": error(a, b) for name, a, b in pairs}


def _pulled(
    layer: Layer, k: int, dy: jax.Array, x: jax.Array, router: jax.Array, weights: ExpertWeights
) -> object:
    """Returns the output and the gradients."""
    y, pull = jax.vjp(lambda x, router, weights: layer(x, router, weights, k), x, router, weights)
    return y, pull(dy)


def operands(
    shape: ExpertShape, dtype: Any
) -> tuple[tuple[jax.Array, jax.Array, ExpertWeights], jax.Array]:
    """x, router and weights; and the cotangent of the output."""
    n, e, h, experts = shape.tokens, shape.embed, shape.hidden, shape.experts
    keys = iter(jax.random.split(jax.random.key(0), 6))

    def normal(*dims: int) -> jax.Array:
        fan_in = dims[-2] if len(dims) > 2 else 1
        return (jax.random.normal(next(keys), dims) * fan_in**-0.5).astype(dtype)

    router = normal(e, experts) * e**-0.5
    weights = normal(experts, e, h), normal(experts, e, h), normal(experts, h, e)
    return (normal(n, e), router.astype(dtype), weights), normal(n, e)
