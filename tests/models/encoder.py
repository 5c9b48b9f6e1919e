"""A model that is not of the package: an encoder (Devlin et al. 2019) that describes itself.

Bidirectional, norms after each branch, learned positions, tied; its loss is of the tokens that were
masked, and beside it it counts those that it found.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import operations as of
from jaxtrain.attention.kernels import attention
from jaxtrain.losses.cross_entropy import HeadConfig, LossSums, cross_entropy
from jaxtrain.models.adapters import column, row
from jaxtrain.models.description import ModelDescription
from jaxtrain.models.layered import LayeredModel, stacked_blocks, vocabulary_table
from jaxtrain.nn.norm import LayerNorm, Norm
from jaxtrain.nn.param import normal

MASK, PADDED, MATRIX = 0, 64, dict(std=0.05)


@dataclass(frozen=True)
class Cloze:
    """Rows of a walk on a ring of ids, every third of which is hidden."""

    vocab: int = 60
    seq: int = 16

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        return Rows(self, seed + (split != "train"))


class Rows:
    def __init__(self, data: Cloze, seed: int) -> None:
        self.vocab, self.seq, self.seed, self.digest = data.vocab, data.seq, seed, f"cloze {seed}"

    def __len__(self) -> int:
        return 512

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        draws = [np.random.default_rng((self.seed, int(i) % 512)) for i in indices]
        steps = np.stack([r.integers(1, 3, self.seq) for r in draws])
        original = (1 + np.cumsum(steps, 1) % (self.vocab - 1)).astype(np.int32)
        hidden = np.stack([r.random(self.seq) < 1 / 3 for r in draws])
        noised = np.where(hidden, MASK, original).astype(np.int32)
        return {"noised": noised, "original": original, "hidden": hidden.astype(np.float32)}


@dataclass(frozen=True)
class EncoderConfig:
    vocab: int = 60
    width: int = 64
    heads: int = 8
    layers: int = 4
    positions: int = 16

    def build(self, key: jax.Array, *, kernel: Any = None) -> Encoder:
        return Encoder(self, kernel, key=key)

    def describe(self) -> ModelDescription:
        w, size, square = self.width, self.width // self.heads, partial(of.Weight, rows=self.width)
        into = of.ColumnParallel(tuple(square(k, columns=w) for k in ("query", "key", "value")))
        call = of.AttentionCall(self.heads, self.heads, size, causal=False)
        up, down = of.Weight("up", w, 2 * w), of.Weight("down", 2 * w, w)
        block: of.Block = (
            of.Residual((into, call, of.RowParallel(square("out", columns=w)))),
            of.Elementwise(("first_norm.",)),
            of.Residual((of.ColumnParallel((up,)), of.Elementwise(), of.RowParallel(down))),
            of.Elementwise(("last_norm.",)),
        )
        return ModelDescription(
            embed=w,
            period=(block,),
            periods=self.layers,
            head=of.Head("words", self.vocab, PADDED, chunk_tokens=32),
            lookups=("words",),
            tables=("words", "places"),
            entry=(of.Bias(("places",)), of.Elementwise(("norm.",))),
            fields={name: ("seq",) for name in ("noised", "original", "hidden")},
            positions=self.positions,
            weights="hidden",
            sums=("accuracy",),
        )


class Layer(nnx.Module):
    def __init__(self, config: EncoderConfig, kernel: Any, key: jax.Array) -> None:
        w, self.heads, self.kernel = config.width, config.heads, kernel
        self.query = normal(key, "query", (w, w), ("embed", "heads"), **MATRIX)
        self.key = normal(key, "key", (w, w), ("embed", "kv_heads"), **MATRIX)
        self.value = normal(key, "value", (w, w), ("embed", "kv_heads"), **MATRIX)
        self.out = normal(key, "out", (w, w), ("heads", "embed"), **MATRIX)
        self.up = normal(key, "up", (w, 2 * w), ("embed", "mlp"), **MATRIX)
        self.down = normal(key, "down", (2 * w, w), ("mlp", "embed"), **MATRIX)
        self.first_norm, self.last_norm = Norm(LayerNorm(), w), Norm(LayerNorm(), w)

    def __call__(self, x: jax.Array, places: jax.Array, comm: Any, *, layer: Any) -> jax.Array:
        x = self.first_norm(x + self.attend(x, places, comm))
        return self.last_norm(x + self.multiply(x, comm))

    def attend(self, x: jax.Array, places: jax.Array, comm: Any) -> jax.Array:
        shape = (*places.shape, -1, x.shape[-1] // self.heads)
        q, k, v = (y.reshape(shape) for y in column(comm, self, ("query", "key", "value"), x))
        kernel = partial(attention, causal=False, kernel=self.kernel)
        o = comm.attend(lambda q, k, v, s: kernel(q, k, v, starts=s), q, k, v, None)
        return row(comm, self, "out", o.reshape(-1, o.shape[-2] * o.shape[-1]))

    def multiply(self, x: jax.Array, comm: Any) -> jax.Array:
        (h,) = column(comm, self, ("up",), x)
        return row(comm, self, "down", jax.nn.gelu(h))


class Encoder(LayeredModel):
    lookup, tokens = "words", "noised"

    def __init__(self, config: EncoderConfig, kernel: Any, *, key: jax.Array) -> None:
        self.config, shape = config, (PADDED, config.width)
        self.words = vocabulary_table(key, "words", shape, std=0.05, real=config.vocab)
        table = (config.positions, config.width)
        self.places = normal(key, "places", table, ("seq", "embed"), **MATRIX)
        self.norm = Norm(LayerNorm(), config.width)
        self.period = stacked_blocks(key, [partial(Layer, config, kernel)], config.layers)

    def context(self, batch: Any, key: Any, comm: Any) -> jax.Array:
        at = jnp.arange(batch["noised"].shape[1], dtype=jnp.int32)
        return at[None] + 0 * batch["noised"]

    def enter(self, tables: Any, batch: Any, places: Any, comm: Any, loop: Any) -> jax.Array:
        x = comm.embed(tables["words"], batch["noised"].reshape(-1))
        table, x = self.gather_param(comm, "places", x)
        return self.norm(x + table[comm.tokens(places.reshape(-1))])

    def leave(
        self, tables: Any, x: jax.Array, batch: Any, places: Any, comm: Any, loop: Any
    ) -> LossSums:
        targets, weights = batch["original"].reshape(-1), batch["hidden"].reshape(-1)
        frozen = bool(comm.frozen_of({"words": tables["words"]}, ""))
        config = HeadConfig(self.config.vocab, chunk_tokens=32, frozen=frozen, accuracy=True)
        sums = cross_entropy(comm, x, tables["words"], targets, weights, config, rows=len(places))
        right = {"accuracy": jax.lax.stop_gradient(sums[1])}
        return LossSums(sums[0], jnp.sum(weights) / comm.vocab_ways(), right)
