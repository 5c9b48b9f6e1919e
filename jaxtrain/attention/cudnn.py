"""cuDNN's fused attention on GPUs, packed documents included.

`jax.nn.dot_product_attention` turns documents into a dense seq x seq mask; cuDNN itself takes a
table of where each begins and how long it is, and does not compute what lies between two of them.
JAX has that form below its public names: the two primitives that are called here, below also the
code that makes that table, which in JAX 0.10 counts a packed key's place in query heads: with
grouped queries that is another document's.

cuDNN takes memory for each sequence as if it were as long as the longest may be, and clears it:
with 64 documents in each row of Llama 3.2 1B that was 4.3 GB a row, and most of the backward pass's
time (experiments/LOG.md, on an H200). So documents are computed in groups of similar lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.documents import Group, Starts, TwoStarts, group, table
from jaxtrain.attention.fused import Attended, Keys, Query, SavedAttention, attend
from jaxtrain.attention.online_softmax import MASKED, Scoring
from jaxtrain.attention.refusal import function_violations, refuse
from jaxtrain.program.totals import FALLBACK

GPU_BLOCKS = Blockwise(query_block=256, key_block=512)
"""Not measured: larger tiles than elsewhere, for fewer kernels."""

Statistics = Float32[Array, "sequences heads seq"]
"""cuDNN's log-sum-exp: of packed rows each document has a sequence of its own, from its first
token on; of others each row."""


class PackedSequences(NamedTuple):
    """Packed sequences of queries or of keys, as cuDNN takes them.

    lengths: tokens of each sequence. firsts: number of each sequence's first token in the whole
    batch, followed by the number of tokens.
    """

    lengths: Int[Array, " sequences"]
    firsts: Int[Array, " sequences+1"]


Packed = tuple[PackedSequences, PackedSequences]
"""Of queries, and of keys."""

AttentionBranch = Callable[..., tuple[jax.Array, ...]]
"""One of two ways to compute the same arrays."""


SHORTEST = 128
"""Tokens of cuDNN's tiles: the longest of each group is a multiple."""

RATIO = 4
"""Longest document of a group over that of the next: a group has room for all that a row can hold
of its lengths, so memory is at most this many times that of the tokens."""


class Lengths(NamedTuple):
    """Documents of more than `above` and at most `longest` tokens; room: for how many, at least, in
    a row of `longest` tokens."""

    above: int
    longest: int
    room: int


def length_groups(seq: int, documents: int) -> list[Lengths]:
    """Returns ranges of lengths, longest first, into which the documents of rows of `seq` tokens
    are sorted. Each has room for all documents of its lengths, but the last: it has room for
    `documents` short ones a row."""
    groups, longest = [], seq
    while longest % RATIO == 0 and (shorter := longest // RATIO) % SHORTEST == 0:
        groups.append(Lengths(shorter, longest, RATIO))
        longest = shorter
    return [*groups, Lengths(0, longest, max(2, -(-documents * longest // seq)))]


@dataclass(frozen=True)
class Cudnn:
    """cuDNN's fused attention (GPU, 16-bit): causal or not, windows, grouped queries, documents.

    documents: for how many short ones there is room in the mean of a device's rows; in rows of
      4,096 tokens those of up to 256 are short (`length_groups`). Long ones always have room. Room
      costs memory while a layer is pulled back, and time to clear it. Where a device has more it
      takes `Blockwise`, far slower. Packed documents need a Hopper or later (compute capability 9).
    Raises ValueError for what it cannot compute: a softcap, 32-bit inputs, a head_dim that is not a
    multiple of 8 or above 128, a q of 2**31 elements or more.
    """

    runs_on: ClassVar[str] = "gpu"
    """The platform that it is of."""
    documents: int = 64

    def __post_init__(self) -> None:
        if self.documents < 2:
            raise ValueError(f"Cudnn has documents={self.documents}; use 2 or more, as 64")

    def violations(self, head_dim: int, *, softcap: float | None, dtype: Any) -> list[str]:
        """Returns the reasons why the kernel cannot compute this."""
        violations = []
        if head_dim % 8 or head_dim > 128:
            violations.append(f"head_dim={head_dim} is not a multiple of 8 up to 128")
        if softcap is not None:
            violations.append(f"softcap={softcap} is not supported")
        if dtype not in (jnp.bfloat16, jnp.float16):
            violations.append(f"dtype={jnp.dtype(dtype)} is not bfloat16 or float16")
        return violations

    def refusals(self, q: Query, scoring: Scoring, *, documents: bool, between: bool) -> list[str]:
        refusals = self.violations(q.shape[3], softcap=scoring.softcap, dtype=q.dtype)
        refusals += function_violations(scoring)
        if q.size >= 2**31:
            refusals.append(f"q {q.shape} has 2**31 elements or more; use more microbatches")
        if between and (window := scoring.mask.window) is not None:
            refusals.append(f"window={window} between different places is not supported")
        return refusals

    def __call__(
        self, q: Query, k: Keys, v: Keys, starts: Starts | None, scoring: Scoring
    ) -> Attended:
        documents = starts is not None
        refuse("Cudnn", self.refusals(q, scoring, documents=documents, between=False))
        return attend(self, q, k, v, starts, scoring)

    def forward(
        self, q: Query, k: Keys, v: Keys, starts: Starts | TwoStarts | None, scoring: Scoring
    ) -> Attended:
        if starts is None:
            o, statistics = _forward(q, k, v, None, scoring)
            return o, statistics.swapaxes(1, 2)
        if isinstance(starts, tuple):
            return _forward_between(q, k, v, starts, scoring)
        parts = self._parts(starts)

        def fused(q: Query, k: Keys, v: Keys) -> Attended:
            o, lse = jnp.zeros_like(q), jnp.zeros_like(q, jnp.float32, q.shape[:3])
            for part in parts:
                queries, keys, values = (part.folded(x) for x in (q, k, v))
                masks = part.sequences, part.scoring(scoring)
                own, statistics = _forward(queries, keys, values, *masks)
                o = part.placed(own, o)
                lse = part.placed(part.from_statistics(statistics), lse)
            return o, lse

        def portable(q: Query, k: Keys, v: Keys) -> Attended:
            with jax.named_scope(FALLBACK):
                return GPU_BLOCKS.forward(q, k, v, starts, scoring)

        shapes = q.shape, q.shape[:3]
        o, lse = _either(parts[-1].fits, fused, portable, (q, k, v), shapes)
        return o, lse

    def backward(
        self, saved: SavedAttention, do: Query, scoring: Scoring
    ) -> tuple[Query, Keys, Keys]:
        q, k, v, starts, o, lse = saved
        if starts is None:
            return _backward(q, k, v, None, lse.swapaxes(1, 2), do, o, scoring)
        if isinstance(starts, tuple):
            return _backward_between(saved, starts, do, scoring)
        parts = self._parts(starts)

        def fused(q: Query, k: Keys, v: Keys, do: Query, o: Query) -> tuple[Query, Keys, Keys]:
            gradients: tuple[Any, ...] = tuple(map(jnp.zeros_like, (q, k, v)))
            for part in parts:
                queries, keys, values, dout, out = (part.folded(x) for x in (q, k, v, do, o))
                results = part.to_statistics(lse), dout, out, part.scoring(scoring)
                written = _backward(queries, keys, values, part.sequences, *results)
                gradients = tuple(map(part.placed, written, gradients))
            dq, dk, dv = gradients
            return dq, dk, dv

        def portable(q: Query, k: Keys, v: Keys, do: Query, o: Query) -> tuple[Query, Keys, Keys]:
            with jax.named_scope(FALLBACK):
                saved = SavedAttention(q, k, v, starts, o, lse)
                dq, dk, dv = GPU_BLOCKS.backward(saved, do, scoring)
                return dq, dk, dv

        shapes = q.shape, k.shape, v.shape
        dq, dk, dv = _either(parts[-1].fits, fused, portable, (q, k, v, do, o), shapes)
        return dq, dk, dv

    def _parts(self, starts: Starts) -> list[DocumentGroup]:
        documents, parts = table(starts), list[DocumentGroup]()
        for lengths in length_groups(starts.shape[1], self.documents):
            room = starts.size // lengths.longest * lengths.room
            entries = group(documents, lengths.above, lengths.longest, room)
            parts.append(DocumentGroup(lengths, entries, documents.position))
        return parts


def _either(
    fits: Bool[Array, ""],
    fused: AttentionBranch,
    portable: AttentionBranch,
    operands: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
) -> tuple[jax.Array, ...]:
    """Returns the results, of these shapes, of fused(*operands) if it fits, else of
    portable(*operands).

    XLA lays out what a conditional takes and gives as any of its branches likes. Loops over tiles
    like heads before tokens, so all was transposed for cuDNN and back (18 ms of the 1,040 of a step
    of Llama 3.2 1B on an H200). Heads and their dims therefore travel as one dim, which leaves no
    choice.
    """

    def joined(arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(x.reshape(*x.shape[:2], -1) for x in arrays)

    def split(arrays: Sequence[jax.Array], shapes: Iterable[tuple[int, ...]]) -> list[jax.Array]:
        return [x.reshape(shape) for x, shape in zip(arrays, shapes, strict=True)]

    def run(branch: AttentionBranch) -> AttentionBranch:
        return lambda *arrays: joined(branch(*split(arrays, [x.shape for x in operands])))

    # Without the barrier XLA moves the reshapes into the branches, and has the choice again.
    taken = lax.optimization_barrier(joined(operands))
    return tuple(split(lax.cond(fits, run(fused), run(portable), *taken), shapes))


class DocumentGroup(NamedTuple):
    """One group of a batch's documents. position: of each token, in its document."""

    lengths: Lengths
    group: Group
    position: Int[Array, "batch seq"]

    @property
    def has(self) -> Bool[Array, "batch seq"]:
        """True for tokens of the group's documents."""
        return self.group.slot < self.group.lengths.size

    @property
    def fits(self) -> Bool[Array, ""]:
        return self.group.count <= self.group.lengths.size

    @property
    def sequences(self) -> Packed:
        return (PackedSequences(self.group.lengths, self.group.firsts),) * 2

    def scoring(self, scoring: Scoring) -> Scoring:
        """Without a window that no document of the group is longer than."""
        window = scoring.mask.window
        if window is None or window < self.lengths.longest:
            return scoring
        return replace(scoring, mask=replace(scoring.mask, window=None))

    def folded(self, x: jax.Array) -> jax.Array:
        """The same memory as rows of the group's longest document."""
        return x.reshape(-1, self.lengths.longest, *x.shape[2:])

    def placed(self, x: jax.Array, others: jax.Array) -> jax.Array:
        """Returns x for the group's tokens, which alone are written, and others for the rest."""
        has = jnp.expand_dims(self.has, range(2, others.ndim))
        return jnp.where(has, x.reshape(others.shape), others)

    def from_statistics(self, statistics: Statistics) -> Float32[Array, "batch tokens heads"]:
        """Returns the log-sum-exp of the group's tokens, anything for others."""
        return statistics[self.group.slot, :, self.position]

    def to_statistics(self, lse: Float32[Array, "batch tokens heads"]) -> Statistics:
        """Returns the log-sum-exp as cuDNN has it, 0 where no document is."""
        shape = (self.group.lengths.size, lse.shape[2], self.lengths.longest)
        empty = jnp.zeros_like(lse, shape=shape)
        return empty.at[self.group.slot, :, self.position].set(lse, mode="drop")


def _spanning(
    of_queries: Starts, of_keys: Starts
) -> tuple[Packed, Bool[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Returns the document with both queries and keys, and which queries and keys belong to it.

    All keys precede all queries of a row, so only the document of the last key and the first query
    can have both.
    """
    batch, seq = of_queries.shape
    spans = of_queries[:, :1] == of_keys[:, -1:]
    in_queries = (of_queries == of_queries[:, :1]) & spans
    in_keys = (of_keys == of_keys[:, -1:]) & spans
    lengths, key_lengths = (jnp.sum(x, axis=1, dtype=jnp.int32) for x in (in_queries, in_keys))
    rows, end = jnp.arange(batch, dtype=jnp.int32) * seq, jnp.full(1, batch * seq, jnp.int32)
    queries = PackedSequences(lengths, jnp.concatenate([rows, end]))
    keys = PackedSequences(key_lengths, jnp.concatenate([rows + seq - key_lengths, end]))
    return (queries, keys), in_queries, in_keys


def _forward_between(q: Query, k: Keys, v: Keys, starts: TwoStarts, scoring: Scoring) -> Attended:
    packed, in_queries, _ = _spanning(*starts)
    o, statistics = _forward(q, k, v, packed, scoring)
    # A row's sequence begins with its first query. Results beyond the sequence are not written.
    lse = jnp.where(in_queries[:, :, None], statistics.swapaxes(1, 2), MASKED)
    return jnp.where(in_queries[:, :, None, None], o, jnp.zeros((), o.dtype)), lse


def _backward_between(
    saved: SavedAttention, starts: TwoStarts, do: Query, scoring: Scoring
) -> tuple[Query, Keys, Keys]:
    q, k, v, _, o, lse = saved
    packed, in_queries, in_keys = _spanning(*starts)
    gradients = _backward(q, k, v, packed, lse.swapaxes(1, 2), do, o, scoring)
    written = (in_queries, in_keys, in_keys)
    dq, dk, dv = (
        jnp.where(mask[:, :, None, None], dx, jnp.zeros((), dx.dtype))
        for mask, dx in zip(written, gradients, strict=True)
    )
    return dq, dk, dv


def _options(packed: Packed | None, scoring: Scoring) -> dict[str, Any]:
    """The static arguments of both primitives."""
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

    # JAX 0.12 takes a function of the scores too.
    unscored = {"score_mod_name": None, "score_mod_jaxpr": None}

    plain = MaskType.CAUSAL if scoring.mask.causal else MaskType.NO_MASK
    padded = MaskType.PADDING_CAUSAL if scoring.mask.causal else MaskType.PADDING
    return dict(
        scale=scoring.scale,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),  # no bias, and no gradient of one
        mask_type=plain if packed is None else padded,
        layout=AttentionLayout.BTNH.value,
        sliding_window_length=scoring.mask.window,
        **(unscored if jax.__version_info__ >= (0, 12) else {}),
    )


def _operands(q: Query, k: Keys, v: Keys, packed: Packed | None) -> tuple[jax.Array, ...]:
    """Returns the operands of both primitives: q, k, v, bias and page tables (empty), and for
    documents the lengths and the first elements in memory, of queries and of keys."""
    none = jnp.zeros(0, q.dtype)
    if packed is None:
        return (q, k, v, *(none,) * 7)
    # JAX reads the table's size from the shape, so each row gets an equal share of it. The entry
    # after all first elements is the end of the last sequence.
    batch = len(q)
    ends = jnp.full(batch - 1, q.shape[0] * q.shape[1], jnp.int32)
    lengths = [side.lengths.reshape(batch, -1) for side in packed]
    tokens = [jnp.concatenate([side.firsts, ends]).reshape(batch, -1) for side in packed]
    elements = [n * (x.shape[2] * x.shape[3]) for n, x in zip(tokens, (q, k), strict=True)]
    return (q, k, v, none, *lengths, *elements, none, none)


def _forward(
    q: Query, k: Keys, v: Keys, packed: Packed | None, scoring: Scoring
) -> tuple[Query, Statistics]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    operands, options = _operands(q, k, v, packed), _options(packed, scoring)
    o, statistics = cudnn._dot_product_attention_fwd_p.bind(*operands, **options, is_training=True)
    return o, statistics


def _backward(
    q: Query,
    k: Keys,
    v: Keys,
    packed: Packed | None,
    statistics: Statistics,
    do: Query,
    o: Query,
    scoring: Scoring,
) -> tuple[Query, Keys, Keys]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    operands = (*_operands(q, k, v, packed), statistics, o, do)
    dq, dk, dv = cudnn._dot_product_attention_bwd_p.bind(*operands, **_options(packed, scoring))
    return dq, dk, dv
