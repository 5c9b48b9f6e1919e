"""A model that is not of the package, with a stream of two arrays and an operation of its own: each
layer is one of a recurrent encoder of the source (gated linear attention, Yang et al. 2024) and one
of a decoder that attends to it (Vaswani et al. 2017)."""

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
from jaxtrain.models import LayeredModel, Member, ModelDescription, stacked_blocks, vocabulary_table
from jaxtrain.models.adapters import column, row
from jaxtrain.nn.norm import Norm, RMSNorm
from jaxtrain.nn.param import normal

VOCAB, PADDED, SEQ = 30, 32, 8
Stream = dict[str, jax.Array]


@dataclass(frozen=True)
class Reversed:
    """The target is the source backwards."""

    vocab: int = VOCAB
    seq: int = SEQ

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        return Rows(seed + (split != "train"))


class Rows:
    def __init__(self, seed: int) -> None:
        self.vocab, self.seed, self.digest = VOCAB, seed, f"reversed {seed}"

    def __len__(self) -> int:
        return 512

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        draws = [np.random.default_rng((self.seed, int(i) % 512)) for i in indices]
        source = np.stack([r.integers(1, VOCAB, SEQ) for r in draws]).astype(np.int32)
        tokens = np.pad(source[:, :0:-1], ((0, 0), (1, 0)))
        weights = np.ones(source.shape, np.float32)
        return dict(tokens=tokens, source=source, targets=source[:, ::-1], weights=weights)


@dataclass(frozen=True)
class LinearAttention(of.Operation):
    """Its derivative reads its input, and the first of two products of [seq, seq] in each head."""

    size: int

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[of.Node]:
        flops, read = 2 * SEQ * self.size, (entry, number)
        counted = dict(token_flops=2 * flops, inner_flops=flops)
        return [of.Node(inputs=(entry,), input_reads=read, **counted)]


@dataclass(frozen=True)
class TranslatorConfig:
    width: int = 16
    wide: int = 32  # of the source
    heads: int = 8
    layers: int = 4

    def build(self, key: jax.Array, *, kernel: Any = None) -> Translator:
        return Translator(self, kernel, key=key)

    def describe(self) -> ModelDescription:
        w, v = self.width, self.wide
        weights = tuple(of.Weight(name, v, v) for name in ("receive", "remember", "recall"))
        recurrence = (
            of.ColumnParallel((*weights, of.Weight("gate", v, self.heads))),
            LinearAttention(v),
            of.RowParallel(of.Weight("give", v, v)),
        )
        ours, theirs = of.Weight("query", w, w), (of.Weight("key", v, w), of.Weight("value", v, w))
        attends = (
            of.Branches(
                ((of.ColumnParallel((ours,)),), (of.Read("source"), of.ColumnParallel(theirs)))
            ),
            of.AttentionCall(self.heads, self.heads, w // self.heads, causal=False),
            of.RowParallel(of.Weight("out", w, w)),
        )
        block: of.Block = (
            of.Update("source", (of.Residual(recurrence),)),
            of.Update("x", (of.Residual(attends),)),
        )
        return ModelDescription(
            embed=w,
            stream={"x": Member(w, ("words",)), "source": Member(v, ("others",), leaves=False)},
            period=(block,),
            periods=self.layers,
            head=of.Head("words", VOCAB, PADDED, chunk_tokens=32),
            lookups=("words", "others"),
            tables=("words", "others"),
            entry=(of.Update("source", (of.Elementwise(("norm.",)),)),),
            fields={name: ("seq",) for name in ("tokens", "source", "targets", "weights")},
        )


class Layer(nnx.Module):
    def __init__(self, config: TranslatorConfig, kernel: Any, key: jax.Array) -> None:
        w, v, self.heads, self.kernel = config.width, config.wide, config.heads, kernel
        make, small = partial(normal, key, std=0.1), partial(normal, key, std=0.1)
        for name in ("receive", "remember", "recall"):
            setattr(self, name, small(name, (v, v), ("embed", "heads")))
        self.gate = make("gate", (v, self.heads), ("embed", "heads"))
        self.give = make("give", (v, v), ("heads", "embed"))
        self.query = make("query", (w, w), ("embed", "heads"))
        self.key = make("key", (v, w), ("embed", "kv_heads"))
        self.value = make("value", (v, w), ("embed", "kv_heads"))
        self.out = make("out", (w, w), ("heads", "embed"))

    def __call__(self, stream: Stream, rows: jax.Array, comm: Any, *, layer: Any) -> Stream:
        source = stream["source"] + self.recur(stream["source"], rows.shape, comm)
        ((query,), (key, value)) = (
            column(comm, self, names, x)
            for names, x in ((("query",), stream["x"]), (("key", "value"), source))
        )
        size = self.query.shape[0] // self.heads
        q, k, v = (y.reshape(*rows.shape, -1, size) for y in (query, key, value))
        kernel = partial(attention, causal=False, kernel=self.kernel)
        o = comm.attend(lambda q, k, v, s: kernel(q, k, v, starts=s), q, k, v, None)
        out = row(comm, self, "out", o.reshape(-1, o.shape[-2] * size))
        return {"x": stream["x"] + out, "source": source}

    def recur(self, x: jax.Array, shape: tuple[int, ...], comm: Any) -> jax.Array:
        *qkv, gate = column(comm, self, ("receive", "remember", "recall", "gate"), x)
        q, k, v = (y.reshape(*shape, -1, x.shape[-1] // self.heads) for y in qkv)
        decay = jnp.cumsum(jax.nn.log_sigmoid(gate.reshape(*shape, -1)), axis=1)
        earlier = jnp.tril(jnp.ones((SEQ, SEQ), bool))[..., None]
        kept = jnp.exp(jnp.where(earlier, decay[:, :, None] - decay[:, None], -jnp.inf))
        o = jnp.einsum("rqkh,rkhd->rqhd", jnp.einsum("rqhd,rkhd->rqkh", q, k) * kept, v)
        return row(comm, self, "give", o.reshape(-1, o.shape[-2] * o.shape[-1]))


class Translator(LayeredModel):
    lookup = "words"

    def __init__(self, config: TranslatorConfig, kernel: Any, *, key: jax.Array) -> None:
        table = partial(vocabulary_table, key, std=0.5, real=VOCAB)
        self.words = table("words", (PADDED, config.width))
        self.others = table("others", (PADDED, config.wide))
        self.norm = Norm(RMSNorm(), config.wide)
        self.period = stacked_blocks(key, [partial(Layer, config, kernel)], config.layers)

    def context(self, batch: Any, key: Any, comm: Any) -> jax.Array:
        return batch["tokens"]

    def gather_lookups(self, comm: Any, batch: Any) -> Any:
        words, ids = self.gather_param(comm, "words", batch["tokens"])
        others, source = self.gather_param(comm, "others", batch["source"])
        return {"words": words, "others": others}, {**batch, "tokens": ids, "source": source}

    def enter(self, tables: Any, batch: Any, rows: Any, comm: Any, loop: Any) -> Stream:
        source = comm.embed(tables["others"], batch["source"].reshape(-1))
        x = comm.embed(tables["words"], batch["tokens"].reshape(-1))
        return {"x": x, "source": self.norm(source)}

    def leave(
        self, tables: Any, stream: Stream, batch: Any, rows: Any, comm: Any, loop: Any
    ) -> LossSums:
        targets, weights = batch["targets"].reshape(-1), batch["weights"].reshape(-1)
        frozen = bool(comm.frozen_of({"words": tables["words"]}, ""))
        head, of_rows = HeadConfig(VOCAB, chunk_tokens=32, frozen=frozen), dict(rows=len(rows))
        loss = cross_entropy(comm, stream["x"], tables["words"], targets, weights, head, **of_rows)
        return LossSums(loss, jnp.sum(weights) / comm.vocab_ways(), {})
