"""The decoder transformer: GPT-2/3, Llama 2/3, Qwen 2/3, Mistral, mixtures of experts, DeepSeek.

Layers are `prefix`, then a *period* of blocks repeated, then `suffix`; the repeated ones are
stacked and looped over. Uniform models have a period of one block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.attention.documents import document_starts
from jaxtrain.attention.kernels import AttentionKernel
from jaxtrain.attention.rotary.rope import tables
from jaxtrain.attention.rotary.scaling import Seq
from jaxtrain.collectives.vary import Index
from jaxtrain.losses.cross_entropy import HeadConfig, LossSums, cross_entropy, logits
from jaxtrain.losses.preferences import local_segments
from jaxtrain.models.description import ABILITIES, ModelDescription
from jaxtrain.models.layered import (
    LayeredModel,
    TableMap,
    layer_key,
    stacked_blocks,
    vocabulary_table,
)
from jaxtrain.moe.layer import Activation, TokenFacts
from jaxtrain.nn.communicator import Communicator
from jaxtrain.nn.dropout import DropoutKeys, dropout
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import put_together, take_apart
from jaxtrain.nn.norm import Norm
from jaxtrain.nn.param import normal
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.operations.elementwise import Bias
from jaxtrain.operations.head import Head
from jaxtrain.remedies import resized, settled
from jaxtrain.telemetry.flops import ModelFlops
from jaxtrain.transformer.attention import Cache
from jaxtrain.transformer.block import BlockConfig, DecoderBlock
from jaxtrain.transformer.decoder_fields import DecoderFields
from jaxtrain.transformer.describe import describe_block
from jaxtrain.transformer.latent import LatentCache
from jaxtrain.transformer.place import Context, Place
from jaxtrain.transformer.small import shrunk, varied
from jaxtrain.transformer.validate import violations

Caches = Cache | LatentCache


@dataclass(frozen=True)
class DecoderConfig(DecoderFields):
    """A decoder language model.

    vocab: number of tokens. embed: width of the residual stream.
    layers: all of them; layers - len(prefix) - len(suffix) is a multiple of len(period).
    learned_positions: rows of a learned position table (GPT-2), None without one.
    tied: the head is the embedding table. vocab_multiple: the table is padded to it, the same on
    every mesh; padded rows get no probability and no gradient. chunk_tokens: tokens whose logits
    exist at one time, None for as many as keep the chip from waiting for its memory. dropout: of
    the embeddings; blocks have their own.
    norm: before the head. embedding_scale: what embeddings are multiplied by. logit_scale: what
    logits are; logit_softcap: logits are softcap * tanh(logits / softcap), None for none. init:
    standard deviations of the first weights.
    period: the blocks that are repeated and stacked; prefix, suffix: those before and behind
    them.
    """

    def violations(self) -> list[str]:
        """Returns violations of the fields, each with its remedy; empty if there are none."""
        return settled(violations(self), self, change=resized, violations_of=violations)

    def untried_violations(self) -> list[str]:
        """`violations`, with remedies that are still to be tried on a mesh."""
        return violations(self)

    def describe(self) -> ModelDescription:
        """Returns the decoder's description."""
        ends = {part: getattr(self, part) for part in ("prefix", "suffix")}
        prefix, suffix = (
            {f"{part}.{i}.": describe_block(b, self.embed) for i, b in enumerate(blocks)}
            for part, blocks in ends.items()
        )
        table = "embedding" if self.tied else "head"
        positions = () if self.learned_positions is None else ("positions",)
        return ModelDescription(
            embed=self.embed,
            period=tuple(describe_block(block, self.embed) for block in self.period),
            periods=self.periods,
            head=Head(table, self.vocab, self.padded_vocab, self.chunk_tokens),
            prefix=prefix,
            suffix=suffix,
            tables=("embedding", *positions, *(() if self.tied else ("head",))),
            entry=tuple(Bias((name,)) for name in positions),
            fields={name: ("seq",) for name in ("tokens", "targets", "weights")},
            positions=self.learned_positions,
            switches=tuple(sorted({rope.switch for rope, _ in self.ropes if rope.switch})),
            can=ABILITIES,
        )

    def flops(
        self, *, seq: int, sequences: int, documents: Mapping[int, float] | None = None
    ) -> ModelFlops:
        """Matmul FLOPs of a forward pass, as `ModelDescription.flops` counts them."""
        return self.describe().flops(seq=seq, sequences=sequences, documents=documents)

    def shrunk(self, devices: int) -> DecoderConfig:
        """Returns a config with the same features, small enough for a laptop, with a few heads per
        device."""
        return replace(self, **shrunk(self, devices))

    def varied(
        self,
        *,
        dropout: float,
        activation: Activation | None = None,
        periods: int | None = None,
        kept_routing: int | None = None,
    ) -> DecoderConfig:
        """Returns the config with these options, None for its own; kept_routing: as in mixtures."""
        options: Any = dict(activation=activation, periods=periods, kept_routing=kept_routing)
        return replace(self, **varied(self, dropout=dropout, **options))

    def build(self, key: jax.Array, *, kernel: AttentionKernel | None = None) -> Decoder:
        """Returns the module; `kernel` is the attention kernel, None lets the platform choose."""
        return Decoder(self, key=key, kernel=kernel)


class Decoder(LayeredModel):
    def __init__(
        self, config: DecoderConfig, *, key: jax.Array, kernel: AttentionKernel | None = None
    ) -> None:
        self.config = config
        init, embed = config.init, config.embed
        place = Place(embed, config.layers, init, config.ropes, kernel)
        shape, std = (config.padded_vocab, embed), init.table_std(embed)
        self.embedding = vocabulary_table(key, "embedding", shape, std=std, real=config.vocab)
        if config.learned_positions is not None:
            positions = (config.learned_positions, embed)
            self.positions = normal(key, "positions", positions, ("seq", "embed"), std=std)

        first, n = len(config.prefix), len(config.period)
        self.first_layer = first
        self.prefix = nnx.List(
            [_block(b, place, layer_key(key, i)) for i, b in enumerate(config.prefix)]
        )
        makes = [partial(_block, b, place) for b in config.period]
        self.period = stacked_blocks(key, makes, config.periods, first=first)
        last = first + n * config.periods
        self.suffix = nnx.List(
            [_block(b, place, layer_key(key, last + i)) for i, b in enumerate(config.suffix)]
        )
        self.norm = Norm(config.norm, embed)
        if not config.tied:
            self.used_next = "head"
            std = init.matrix_std(embed, layers=config.layers)
            self.head = vocabulary_table(key, "head", shape, std=std, real=config.vocab)

    @property
    def head_config(self) -> HeadConfig:
        c = self.config
        return HeadConfig(c.vocab, c.logit_scale, c.logit_softcap, c.chunk_tokens)

    def run_block(
        self, block: Any, x: jax.Array, context: PyTree, comm: Communicator, *, layer: Index
    ) -> jax.Array:
        return block(x, context, comm, layer=layer)[0]

    def enter(
        self, tables: TableMap, batch: Arrays, context: Context, comm: Communicator, loop: LayerLoop
    ) -> jax.Array:
        x = self.embed(tables["embedding"], batch["tokens"], context, comm)
        for i, block in enumerate(self.prefix):
            x = self.run_outside(block, f"prefix.{i}.", x, context, comm, loop, layer=i)
        return x

    def leave(
        self,
        tables: TableMap,
        x: jax.Array,
        batch: Arrays,
        context: Context,
        comm: Communicator,
        loop: LayerLoop,
    ) -> LossSums:
        """Sum of weighted negative log-likelihoods in nats, and of weights; with an objective its
        sums, for which batch has more fields.

        batch: tokens, targets [rows, seq]; optional weights, positions, segments [rows, seq] and
        rows [rows], their global numbers. With recorded routing also places [rows, seq], the number
        of each token in the batch.
        """
        x = self.hidden(x, context, comm, loop)
        head, x = self._head(tables, x, comm)
        name = "embedding" if self.config.tied else "head"
        config = replace(self.head_config, frozen=bool(comm.frozen_of({name: head}, "")))
        if self.objective is not None:
            return self.objective.sums(comm, x, head, batch, config)
        targets, weights = batch["targets"].reshape(-1), _token_weights(batch)
        rows = len(batch["tokens"])
        total = cross_entropy(comm, x, head, targets, weights, config, rows=rows)
        return LossSums(total, jnp.sum(weights) / comm.vocab_ways())

    def logits(
        self,
        tokens: jax.Array,
        *,
        segments: jax.Array | None = None,
        positions: jax.Array | None = None,
        dtype: Any = jnp.float32,
    ) -> jax.Array:
        """Returns the fp32 logits [rows, seq, vocab] of what follows each of `tokens` [rows, seq].

        segments: numbers of the documents in a row, [rows, seq]; a token sees those of its own.
        positions: of tokens in their document; None counts them along the row. dtype: of products.
        """
        batch = self.batch_of(tokens, segments, positions)
        with jax.default_matmul_precision("highest" if dtype == jnp.float32 else None):
            return self._logits(batch, Local(dtype), LayerLoop(remat="none"))

    def batch_of(
        self, tokens: jax.Array, segments: jax.Array | None, positions: jax.Array | None
    ) -> Arrays:
        """Returns a batch for `logits`. Raises ValueError for tokens of another form."""
        if jnp.ndim(tokens) != 2 or not jnp.size(tokens):
            raise ValueError(f"tokens has shape {jnp.shape(tokens)}; give ids [rows, seq]")
        limit = self.config.learned_positions
        if limit is not None and tokens.shape[1] > limit:
            raise ValueError(
                f"rows of {tokens.shape[1]} tokens pass the {limit} learned positions; give "
                "shorter ones"
            )
        given = {"tokens": tokens, "segments": segments, "positions": positions}
        return {name: values for name, values in given.items() if values is not None}

    def blocks(self, comm: Local) -> Iterator[DecoderBlock]:
        """Yields the layers in natural order, each with its parameters in the compute dtype."""
        prefix, parts, suffix = (
            [take_apart(block) for block in blocks]
            for blocks in (self.prefix, self.period, self.suffix)
        )
        stack = (
            (part.static, {name: stacked[period] for name, stacked in part.params.items()})
            for period in range(self.config.periods)
            for part in parts
        )
        for static, params, *_ in (*prefix, *stack, *suffix):
            yield put_together(static, comm.fetch(params, ""))

    def _logits(self, batch: Arrays, comm: Communicator, loop: LayerLoop) -> jax.Array:
        shape = batch["tokens"].shape
        tables, x, _, context = self.run_to_leave(batch, None, comm, loop)
        x = self.hidden(x, context, comm, loop)
        head, x = self._head(tables, x, comm)
        z = logits(x, head, self.head_config)
        return z.reshape(*shape, -1)[..., : self.config.vocab]

    def hidden(
        self, x: jax.Array, context: Context, comm: Communicator, loop: LayerLoop
    ) -> jax.Array:
        """Returns the final hidden states, normalised. x: the stack's output."""
        last = len(self.config.prefix) + len(self.config.period) * self.config.periods
        for i, block in enumerate(self.suffix):
            x = self.run_outside(block, f"suffix.{i}.", x, context, comm, loop, layer=last + i)
        return self.norm(x)

    def _head(
        self, tables: TableMap, x: jax.Array, comm: Communicator
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the gathered head, and x, for which a gather waits."""
        name = "embedding" if self.config.tied else "head"
        return (tables[name], x) if name in tables else self.gather_param(comm, name, x)

    def context(self, batch: Arrays, key: jax.Array | None, comm: Communicator) -> Context:
        """Returns the facts of a batch's tokens that every layer gets."""
        return self._context(batch, key, comm, comm.row_seq(batch["tokens"].shape[1]))

    def _context(
        self, batch: Arrays, key: jax.Array | None, comm: Communicator, row_seq: Seq
    ) -> Context:
        """row_seq: tokens of a complete row so far, on which rotary embeddings may depend."""
        rows, seq = batch["tokens"].shape
        indices = jnp.broadcast_to(comm.positions(seq)[None], (rows, seq))
        # Adding 0 * tokens gives the tokens' varying axes: else JAX would sum an unused gradient of
        # positions over the devices on which they are equal.
        positions = batch["positions"] if "positions" in batch else indices + 0 * batch["tokens"]
        keys = None
        if key is not None:
            numbers = batch.get("rows", jnp.arange(rows, dtype=jnp.int32))
            keys = DropoutKeys(
                key, comm.tokens(jnp.repeat(numbers, seq)), comm.tokens(indices.reshape(-1))
            )
        ropes = tuple(tables(rope, positions, size, row_seq) for rope, size in self.config.ropes)
        starts = document_starts(batch["segments"]) if "segments" in batch else None
        weights = _token_weights(batch) if self.config.balanced else None
        places = batch["places"].reshape(-1) if "places" in batch else None
        real = _real_tokens(batch, comm) if self.config.limited else None
        return Context(positions, starts, ropes, keys, facts=TokenFacts(weights, places, real))

    def embed(
        self, table: jax.Array, ids: jax.Array, context: Context, comm: Communicator
    ) -> jax.Array:
        """Returns the residual stream before the first layer, [tokens share, embed]."""
        config = self.config
        x = comm.embed(table, ids.reshape(-1))
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        if config.learned_positions is not None:
            positions, x = self.gather_param(comm, "positions", x)
            x = x + positions[comm.tokens(context.positions.reshape(-1))]
        x = comm.constrain(x, "batch*seq", "embed")
        return dropout(x, config.dropout, context.keys, name="embedding")

    def empty_cache(self, rows: int, max_seq: int, dtype: Any) -> list[Caches]:
        """Returns caches for `decode`: one for each layer outside the period, stacked ones for its
        blocks."""
        config = self.config

        def cache(block: BlockConfig, *lead: int) -> Caches:
            return block.attention.empty_cache(config.embed, (*lead, rows, max_seq), dtype)

        inner = [cache(b, config.periods) for b in config.period]
        return [*map(cache, config.prefix), *inner, *map(cache, config.suffix)]

    def decode(
        self, ids: jax.Array, caches: list[Caches], index: jax.Array, *, comm: Local
    ) -> tuple[jax.Array, list[Caches]]:
        """Returns fp32 logits [rows, new, padded vocab] of new tokens [rows, new] after `index`
        others, and the updated caches."""
        rows, new = ids.shape
        positions = jnp.broadcast_to((index + jnp.arange(new, dtype=jnp.int32))[None], (rows, new))
        batch = {"tokens": ids, "positions": positions}
        context = self._context(batch, None, comm, index + new)._replace(index=index)
        table, ids = self.gather_param(comm, "embedding", ids)
        x = self.embed(table, ids, context, comm)
        first, n = len(self.prefix), len(self.period)
        out: list[Any] = list(caches)
        for i, block in enumerate(self.prefix):
            used, x = _gather_block(block, f"prefix.{i}.", comm, x)
            x, out[i] = used(x, context, comm, layer=i, cache=caches[i])
        parts = [take_apart(block) for block in self.period]

        def step(x: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
            params, stacked = inputs
            updated = []
            for i, part in enumerate(parts):
                block = put_together(part.static, comm.fetch(params[i], f"period.{i}."))
                x, cache = block(x, context, comm, layer=0, cache=stacked[i])
                updated.append(cache)
            return x, updated

        x, out[first : first + n] = jax.lax.scan(
            step, x, ([part.params for part in parts], caches[first : first + n])
        )
        for i, block in enumerate(self.suffix, start=first + n):
            name = f"suffix.{i - first - n}."
            used, x = _gather_block(block, name, comm, x)
            x, out[i] = used(x, context, comm, layer=0, cache=caches[i])
        head = table if self.config.tied else self.gather_param(comm, "head", x)[0]
        z = logits(self.norm(x), head, self.head_config)
        return z.reshape(rows, new, -1), out


def _token_weights(batch: Arrays) -> jax.Array:
    """Weights [rows * seq] of the tokens in the loss."""
    weights = batch.get("weights", jnp.ones(batch["tokens"].shape, jnp.float32))
    return weights.reshape(-1).astype(jnp.float32)


def _real_tokens(batch: Arrays, comm: Communicator) -> jax.Array | None:
    """Returns [rows * seq], False for padding; None if rows do not say."""
    return (local_segments(batch, comm) > 0).reshape(-1) if "segments" in batch else None


def _block(config: BlockConfig, place: Place, key: jax.Array) -> DecoderBlock:
    return DecoderBlock(config, place, key=key)


def _gather_block(
    block: DecoderBlock, prefix: str, comm: Communicator, x: jax.Array
) -> tuple[DecoderBlock, jax.Array]:
    """Returns the block with its gathered parameters, and x, for which the gather waits."""
    part = take_apart(block)
    params, x = comm.gather(part.params, prefix, x)
    return put_together(part.static, params), x
