"""The decoder transformer: GPT-2/3, Llama 2/3, Qwen 2/3, Mistral and Mixtral.

Layers are `prefix`, then a *period* of blocks repeated, then `suffix`; the repeated ones are
stacked and looped over. Uniform models have a period of one block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.mesh.sharding import PaddedAxis, ShardingRules
from jaxtrain.models.block import Block, BlockConfig, Cache, Context, MoeConfig, Place
from jaxtrain.models.decoder_fields import DecoderFields
from jaxtrain.models.validate import mesh_violations, violations
from jaxtrain.nn.communicator import Communicator, Local
from jaxtrain.nn.dropout import DropoutKeys, dropout
from jaxtrain.nn.loss import HeadConfig, cross_entropy, logits
from jaxtrain.nn.module import STACKED, put_together, take_apart
from jaxtrain.nn.norm import Norm
from jaxtrain.nn.param import named_key, normal
from jaxtrain.nn.remat import rematerialised
from jaxtrain.nn.rotary import tables
from jaxtrain.nn.stack import Body, LayerLoop, Layers
from jaxtrain.telemetry.flops import Attention, Matmul, ModelFlops, forward_flops

Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class DecoderConfig(DecoderFields):
    """A decoder language model.

    vocab: number of tokens. embed: width of the residual stream.
    layers: all of them; layers - len(prefix) - len(suffix) is a multiple of len(period).
    learned_positions: rows of a learned position table (GPT-2), None without one.
    tied: the head is the embedding table. vocab_multiple: the table is padded to it, the same on
    every mesh; padded rows get no probability and no gradient. chunk_tokens: tokens whose logits
    exist at one time. dropout: of the embeddings; blocks have their own.
    norm: before the head. embedding_scale: what embeddings are multiplied by. logit_scale: what
    logits are; logit_softcap: logits are softcap * tanh(logits / softcap), None for none. init:
    standard deviations of the first weights.
    period: the blocks that are repeated and stacked; prefix, suffix: those before and behind
    them.
    """

    def violations(self) -> list[str]:
        """What is wrong with the fields, each with its remedy; empty when all is well."""
        return violations(self)

    def mesh_violations(
        self, rules: ShardingRules, sizes: Mapping[str, int], *, explicit: bool
    ) -> list[str]:
        """What of the model does not split over mesh axes of these sizes."""
        return mesh_violations(self, rules, sizes, explicit=explicit)

    def flops(
        self, *, seq: int, sequences: int, documents: Mapping[int, float] | None = None
    ) -> ModelFlops:
        """Matmul FLOPs of a forward pass over `sequences` sequences; the padded rows of the
        vocabulary are not counted, nor is the embedding look-up; of experts those that a token
        goes through. documents: as for `forward_flops`."""
        matmuls = [Matmul("head", self.embed, self.vocab)]
        layers = []
        for block in self.blocks:
            a, size = block.attention, block.attention.size(self.embed)
            wide, narrow = a.heads * size, a.key_heads * size
            matmuls += [Matmul("attention", self.embed, 2 * wide + 2 * narrow)]
            met = 2 + block.mlp.gated
            if isinstance(block.mlp, MoeConfig):
                matmuls += [Matmul("router", self.embed, block.mlp.experts)]
                met *= block.mlp.experts_per_token
            matmuls += [Matmul("mlp", self.embed, block.mlp.hidden, count=met)]
            layers.append(Attention(a.heads, size, window=a.window))
        return forward_flops(matmuls, layers, seq=seq, sequences=sequences, documents=documents)

    def build(self, key: jax.Array, *, kernel: Any = None) -> Decoder:
        """The module; `kernel` is the attention kernel, None lets the platform choose."""
        return Decoder(self, key=key, kernel=kernel)


class Decoder(nnx.Module):
    def __init__(self, config: DecoderConfig, *, key: jax.Array, kernel: Any = None) -> None:
        self.config = config
        init, embed = config.init, config.embed
        place = Place(embed, config.layers, init, config.ropes, kernel)
        shape, std = (config.padded_vocab, embed), init.table_std(embed)
        self.embedding = _table(key, "embedding", shape, std=std, real=config.vocab)
        if config.learned_positions is not None:
            positions = (config.learned_positions, embed)
            self.positions = normal(key, "positions", positions, ("seq", "embed"), std=std)

        def block(block_config: BlockConfig, layer: Any) -> Block:
            own = jax.random.fold_in(named_key(key, "layer"), layer)
            return Block(block_config, place, key=own)

        first, n = len(config.prefix), len(config.period)
        self.prefix = nnx.List([block(b, i) for i, b in enumerate(config.prefix)])
        numbers = first + n * jnp.arange(config.periods)
        self.period = nnx.List(
            [
                nnx.vmap(partial(block, b), transform_metadata=STACKED)(numbers + i)
                for i, b in enumerate(config.period)
            ]
        )
        last = first + n * config.periods
        self.suffix = nnx.List([block(b, last + i) for i, b in enumerate(config.suffix)])
        self.norm = Norm(config.norm, embed)
        if not config.tied:
            std = init.matrix_std(embed, layers=config.layers)
            self.head = _table(key, "head", shape, std=std, real=config.vocab)

    @property
    def head_config(self) -> HeadConfig:
        c = self.config
        return HeadConfig(c.vocab, c.logit_scale, c.logit_softcap, c.chunk_tokens)

    def loss(
        self,
        batch: Batch,
        *,
        key: jax.Array | None = None,
        comm: Communicator = Local(),  # noqa: B008 (frozen)
        loop: LayerLoop = LayerLoop(),  # noqa: B008 (frozen)
    ) -> tuple[jax.Array, jax.Array]:
        """This device's shares of (sum of weighted negative log-likelihoods in nats, weight).

        batch: tokens, targets [rows, seq]; optional weights, positions, segments [rows, seq] and
        rows [rows], their global numbers. `key` turns dropout on.
        """
        table, ids = self._gathered(comm, "embedding", batch["tokens"])
        batch = {**batch, "tokens": ids}
        context = self.context(batch, key, comm)
        x = self.enter(table, batch, context, comm, loop)
        x = self.run_period(x, context, comm, loop)
        return self.leave(table, x, batch, context, comm, loop)

    def enter(
        self, table: jax.Array, batch: Batch, context: Context, comm: Communicator, loop: LayerLoop
    ) -> jax.Array:
        """What the period begins with, [tokens share, embed]; `table`: the embedding as used,
        [vocab slice, embed]."""
        x = self._embed(table, batch["tokens"], context, comm)
        for i, block in enumerate(self.prefix):
            x = _run_block(block, f"prefix.{i}.", x, context, comm, loop, layer=i)
        return x

    def leave(
        self,
        table: jax.Array,
        x: jax.Array,
        batch: Batch,
        context: Context,
        comm: Communicator,
        loop: LayerLoop,
    ) -> tuple[jax.Array, jax.Array]:
        """`loss` of what the period ends with."""
        x = self.hidden(x, context, comm, loop)
        head, x = (table, x) if self.config.tied else self._gathered(comm, "head", x)
        name = "embedding" if self.config.tied else "head"
        config = replace(self.head_config, frozen=bool(comm.frozen_of({name: head}, "")))
        targets = batch["targets"].reshape(-1)
        weights = batch.get("weights", jnp.ones(targets.shape, jnp.float32)).reshape(-1)
        weights = weights.astype(jnp.float32)
        rows = len(batch["tokens"])
        total = cross_entropy(comm, x, head, targets, weights, config, rows=rows)
        return total, jnp.sum(weights) / comm.vocab_ways()

    def hidden(
        self, x: jax.Array, context: Context, comm: Communicator, loop: LayerLoop
    ) -> jax.Array:
        """The final hidden states, normalised, of what the period ends with."""
        last = len(self.config.prefix) + len(self.config.period) * self.config.periods
        for i, block in enumerate(self.suffix):
            x = _run_block(block, f"suffix.{i}.", x, context, comm, loop, layer=last + i)
        return self.norm(x)

    def _gathered(
        self, comm: Communicator, name: str, after: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """A table as it is used, and `after`."""
        whole, after = comm.gather({name: getattr(self, name)[...]}, "", after)
        return whole[name], after

    def context(self, batch: Batch, key: jax.Array | None, comm: Communicator) -> Context:
        """What every layer is told of a batch's tokens. `key` turns dropout on."""
        rows, seq = batch["tokens"].shape
        at = jnp.broadcast_to(jnp.arange(seq, dtype=jnp.int32)[None], (rows, seq))
        # Of the tokens' type: of what is equal on devices that share the work a gradient would be
        # summed over them, though nobody reads that of positions.
        positions = batch["positions"] if "positions" in batch else at + 0 * batch["tokens"]
        keys = None
        if key is not None:
            numbers = batch.get("rows", jnp.arange(rows, dtype=jnp.int32))
            keys = DropoutKeys(
                key, comm.tokens(jnp.repeat(numbers, seq)), comm.tokens(at.reshape(-1))
            )
        ropes = tuple(tables(rope, positions, size) for rope, size in self.config.ropes)
        return Context(positions, batch.get("segments"), ropes, keys)

    def _embed(
        self, table: jax.Array, ids: jax.Array, context: Context, comm: Communicator
    ) -> jax.Array:
        config = self.config
        x = comm.embed(table, ids.reshape(-1))
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        if config.learned_positions is not None:
            positions, x = self._gathered(comm, "positions", x)
            x = x + positions[comm.tokens(context.positions.reshape(-1))]
        x = comm.constrain(x, "batch*seq", "embed")
        return dropout(x, config.dropout, context.keys, name="embedding")

    def run_period(
        self, x: jax.Array, context: Context, comm: Communicator, loop: LayerLoop
    ) -> jax.Array:
        """All layers of the period."""
        stacked, body = self.stack(comm)
        layers = Layers(
            body,
            fetch=lambda p: comm.fetch(p, "period."),
            scatter=lambda g: comm.scatter(g, "period."),
            loop=loop,
            frozen=comm.frozen_of(stacked, "period."),
        )
        return layers(stacked, x, context)

    def stack(self, comm: Communicator) -> tuple[dict[str, jax.Array], Body]:
        """The period's parameters, named without `period.`, and what one turn of it does."""
        parts = [take_apart(block) for block in self.period]
        first, n = len(self.config.prefix), len(parts)
        stacked = {f"{i}.{k}": v for i, part in enumerate(parts) for k, v in part.params.items()}

        def body(params: Any, x: jax.Array, context: Context, number: Any) -> jax.Array:
            for i, part in enumerate(parts):
                mine = {k: params[f"{i}.{k}"] for k in part.params}
                block = put_together(part.static, mine)
                x, _ = block(x, context, comm, layer=first + number * n + i)
            return x

        return stacked, body

    def empty_cache(self, rows: int, max_seq: int, dtype: Any) -> list[Cache]:
        """Caches for `decode`: one a layer outside the period, stacked ones for its blocks."""
        config = self.config

        def cache(block: BlockConfig, *lead: int) -> Cache:
            a = block.attention
            shape = (*lead, rows, max_seq, a.key_heads, a.size(config.embed))
            return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

        inner = [cache(b, config.periods) for b in config.period]
        return [*map(cache, config.prefix), *inner, *map(cache, config.suffix)]

    def decode(
        self, ids: jax.Array, caches: list[Cache], index: jax.Array, *, comm: Local
    ) -> tuple[jax.Array, list[Cache]]:
        """fp32 logits [rows, new, padded vocab] of new tokens [rows, new] after `index` others."""
        rows, new = ids.shape
        positions = jnp.broadcast_to((index + jnp.arange(new, dtype=jnp.int32))[None], (rows, new))
        context = self.context({"tokens": ids, "positions": positions}, None, comm)
        context = context._replace(index=index)
        table, ids = self._gathered(comm, "embedding", ids)
        x = self._embed(table, ids, context, comm)
        first, n = len(self.prefix), len(self.period)
        out: list[Any] = list(caches)
        for i, block in enumerate(self.prefix):
            used, x = _used(block, f"prefix.{i}.", comm, x)
            x, out[i] = used(x, context, comm, layer=i, cache=caches[i])
        parts = [take_apart(block) for block in self.period]

        def step(x: jax.Array, at: Any) -> tuple[jax.Array, Any]:
            params, stacked = at
            after = []
            for i, part in enumerate(parts):
                block = put_together(part.static, comm.fetch(params[i], f"period.{i}."))
                x, cache = block(x, context, comm, layer=0, cache=stacked[i])
                after.append(cache)
            return x, after

        x, out[first : first + n] = jax.lax.scan(
            step, x, ([part.params for part in parts], caches[first : first + n])
        )
        for i, block in enumerate(self.suffix, start=first + n):
            name = f"suffix.{i - first - n}."
            used, x = _used(block, name, comm, x)
            x, out[i] = used(x, context, comm, layer=0, cache=caches[i])
        head = table if self.config.tied else self._gathered(comm, "head", x)[0]
        z = logits(self.norm(x), head, self.head_config)
        return z.reshape(rows, new, -1), out


def _table(
    key: jax.Array, name: str, shape: tuple[int, int], *, std: float, real: int
) -> nnx.Param:
    """A [vocab, embed] table whose rows from `real` on are zero, and stay so: they get no
    gradient, and weight decay of zero is zero."""
    table = normal(key, name, shape, (PaddedAxis("vocab", real), "embed"), std=std)
    table.set_value(jnp.where(jnp.arange(shape[0])[:, None] < real, table[...], 0.0))
    return table


def _used(
    block: Block, prefix: str, comm: Communicator, after: jax.Array
) -> tuple[Block, jax.Array]:
    """The block with its parameters as they are used, and `after`."""
    part = take_apart(block)
    params, after = comm.gather(part.params, prefix, after)
    return put_together(part.static, params), after


def _run_block(
    block: Block,
    prefix: str,
    x: jax.Array,
    context: Context,
    comm: Communicator,
    loop: LayerLoop,
    *,
    layer: int,
) -> jax.Array:
    """A block outside the period, under the loop's remat policy."""
    part = take_apart(block)

    def run(params: Any, x: jax.Array, context: Context) -> jax.Array:
        params, x = comm.gather(params, prefix, x)
        used = put_together(part.static, params)
        return used(x, context, comm, layer=layer)[0]

    return rematerialised(run, loop.remat)(part.params, x, context)
