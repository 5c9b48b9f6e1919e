"""Attention kernels of a run, held against `Blockwise` in fp32, head by head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.documents import Located
from jaxtrain.attention.fused import FusedKernel, SavedAttention
from jaxtrain.attention.kernels import AttentionKernel, Reference
from jaxtrain.attention.online_softmax import MASKED, AttentionMask, Scoring
from jaxtrain.context.methods import tiles_of
from jaxtrain.context.tiles import tile_kernel
from jaxtrain.health.kernel_case import (
    Distances,
    KernelCase,
    bound_for,
    distance,
    flops_for,
    normals,
    part_norms,
)
from jaxtrain.mesh.roles import Roles
from jaxtrain.mesh.sharding import ways
from jaxtrain.operations.attention import AttentionCall
from jaxtrain.operations.block import attentions
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.running_kernels import kernel_of

Kernel = AttentionKernel | FusedKernel

ROWS = 2
"""Of a problem: kernels of packed documents look across rows."""
MOST_COMMON = 2.5
"""Of all numbers of queries and keys: more would leave gradients to rounding."""
FLOPS_PER_PAIR = 14
"""Of a head's query and key, for each of head_dim: seven products, two of a forward pass."""


@dataclass(frozen=True)
class AttentionProblem:
    """The attention of `ROWS` rows on a device, as a kernel gets it. documents: rows are packed.
    merged: the result is merged with those of other keys, by the log-sum-exp."""

    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    scoring: Scoring
    documents: bool
    merged: bool
    dtype: Any

    @property
    def between(self) -> bool:
        """True if keys are of an earlier part of the row than queries."""
        mask = self.scoring.mask
        return self.merged and (not mask.causal or bool(mask.offset))

    @property
    def apart(self) -> int:
        """Places from the first key to the first query."""
        return (self.scoring.mask.offset or self.seq) if self.between else 0

    @property
    def head_flops(self) -> float:
        """FLOPs of the portable kernel for a key head and its queries."""
        mask = self.scoring.mask
        keys = min(self.seq / (2 if mask.causal else 1), mask.window or self.seq)
        pairs = ROWS * self.seq * keys * self.heads / self.kv_heads
        return FLOPS_PER_PAIR * pairs * self.head_dim

    def within(self, flops: float, kernel: Kernel) -> AttentionProblem:
        """Returns the problem with rows halved, a window with them, as often as the kernel takes
        it, until a key head needs at most so many FLOPs."""
        mask = self.scoring.mask
        if self.head_flops <= flops or self.seq % 2 or not isinstance(kernel, FusedKernel):
            return self
        window = None if mask.window is None else -(-mask.window // 2)
        smaller = replace(mask, window=window, offset=mask.offset // 2)
        half = replace(self, seq=self.seq // 2, scoring=replace(self.scoring, mask=smaller))
        return self if half.refusals(kernel) else half.within(flops, kernel)

    def refusals(self, kernel: FusedKernel) -> list[str]:
        """Returns the reasons why a kernel does not take this problem."""
        facts: Any = dict(documents=self.documents, between=self.between)
        return self._traced(lambda q: kernel.refusals(q, self.scoring, **facts))

    def tile_kernel(self, kernel: Kernel) -> FusedKernel:
        """Returns the kernel that runs: `kernel`, or `Blockwise` where it does not take a tile."""
        return self._traced(
            lambda q: tile_kernel(kernel, q, self.scoring, documents=self.documents)
        )

    def _traced(self, ask: Callable[[jax.Array], Any]) -> Any:
        """Returns what is asked of queries; traced, since a kernel asks for their type."""
        answers: list[Any] = []
        shape = (ROWS, self.seq, self.heads, self.head_dim)
        queries = jax.ShapeDtypeStruct(shape, self.dtype)
        jax.eval_shape(lambda q: answers.append(ask(q)), queries)
        return answers[0]

    def compared_heads(self, flops: float) -> tuple[int, ...]:
        """Numbers of as many key heads as take so many FLOPs: of one the last, else evenly from
        first to last."""
        count = min(max(int(flops / self.head_flops), 1), self.kv_heads)
        return tuple(sorted({round(n) for n in np.linspace(self.kv_heads - 1, 0, count)}))

    def __str__(self) -> str:
        mask, heads = self.scoring.mask, f"{self.heads} heads of {self.head_dim}"
        options = [] if mask.window is None else [f"window={mask.window:,}"]
        options += ["packed documents"] if self.documents else []
        options += ["keys of an earlier part"] if self.between else []
        suffix = f" ({', '.join(options)})" if options else ""
        return f"{heads}, {self.kv_heads} of keys, and {ROWS} rows of {self.seq:,} tokens{suffix}"


def attention_cases(assembly: Assembly, name: Callable[[Any], str]) -> Iterator[KernelCase]:
    """Yields a case for each distinct pair of a problem and an attention kernel that is not
    portable. name: returns the name of a kernel."""
    flops, seen = flops_for(assembly), set()
    for call, roles in _calls(assembly):
        for problem in problems_of(assembly, call, roles):
            kernel = kernel_of(assembly, call, problem.seq)
            kernel = problem.tile_kernel(kernel) if problem.merged else kernel
            key = (kernel, problem := problem.within(flops, kernel))
            if not isinstance(kernel, Blockwise | Reference) and key not in seen:
                seen.add(key)
                compared = problem.compared_heads(flops)
                yield _case(kernel, name(kernel), problem, compared, bound_for(assembly))


def _calls(assembly: Assembly) -> dict[tuple[AttentionCall, Roles], None]:
    """Returns the distinct attentions of the model, with the roles of mesh axes where they are."""
    described, roles = assembly.described, assembly.roles
    outside = roles if assembly.pipeline is None else roles.outside_stack()
    places = [(block, roles) for block in described.period]
    places += [(b, outside) for b in (*described.prefix.values(), *described.suffix.values())]
    return dict.fromkeys((call, found) for block, found in places for call in attentions(block))


def problems_of(assembly: Assembly, call: AttentionCall, roles: Roles) -> list[AttentionProblem]:
    """Problems of an attention on a device: one; if rows are cut one of a device's own keys, and
    one of those of the first and of the last other device."""
    sequences, method = assembly.sequences, assembly.context
    assert sequences is not None, "a batch has tokens where layers attend"
    cut = ways(roles.seq, assembly.sizes)
    trading = 1 if method is None else method.trading(cut)
    tiles = [(sequences.seq, AttentionMask(call.causal, call.window))]
    if method is not None:
        of_method = tiles_of(method, cut, sequences.seq, tiles[0][1])
        kinds = list(dict.fromkeys((size, mask) for _, size, mask in of_method))
        tiles = [*kinds[:2], *kinds[2:][-1:]]
    split = trading * ways(roles.heads, assembly.sizes)
    return [
        AttentionProblem(
            seq=size,
            heads=call.heads // split,
            kv_heads=call.kv_heads // split,
            head_dim=call.head_dim,
            scoring=Scoring(mask, call.settled_scale, call.softcap),
            documents=sequences.documents,
            merged=method is not None and trading < cut,
            dtype=sequences.dtype,
        )
        for size, mask in tiles
    ]


def _case(
    kernel: Kernel, name: str, problem: AttentionProblem, compared: tuple[int, ...], bound: float
) -> KernelCase:
    group = problem.heads // problem.kv_heads
    queries = [f"head {n * group + i}" for n in compared for i in range(group)]
    keys = [f"key head {n}" for n in compared]
    few = f", key heads {', '.join(map(str, compared))}" if len(compared) < problem.kv_heads else ""
    results = {"o": queries, "lse": queries, "dq": queries, "dk": keys, "dv": keys}
    return KernelCase(
        setting=f"attention={name}",
        problem=f"{problem}{few}",
        portable=f"{Blockwise()!r}",
        fix="execution.attention=Blockwise()",
        bound=bound,
        distances=partial(attention_distances, kernel, problem, compared),
        inputs=inputs_of(kernel, problem),
        labels={k: v for k, v in results.items() if k != "lse" or problem.merged},
    )


def inputs_of(kernel: Kernel, problem: AttentionProblem) -> tuple[jax.Array, ...]:
    """Returns what `attention_distances` takes behind its static arguments."""
    key, seq = jax.random.key(0), problem.seq + problem.apart
    if not problem.documents:
        return (key,)
    room = getattr(kernel, "documents", None)
    return key, jnp.asarray(document_starts(seq, seq if room is None else ROWS * room - 1))


def document_starts(seq: int, most: int) -> np.ndarray:
    """Returns the starts [2, seq] of two packed rows: one whole document; and documents of all
    lengths, as many of each power of two, at most `most`, the last of which is the longest then."""
    random, starts, first = np.random.default_rng(0), np.zeros((ROWS, seq), np.int32), 0
    while first < seq and most:
        length = int(seq ** random.uniform()) if most > 1 else seq
        starts[1, first : first + length] = first
        first, most = first + length, most - 1
    return starts


def attention_distances(
    kernel: Kernel,
    problem: AttentionProblem,
    compared: tuple[int, ...],
    key: jax.Array,
    rows: jax.Array | None = None,
) -> Distances:
    """Returns the distances of a kernel's results from those of `Blockwise` in fp32, for these key
    heads and their queries. rows: document starts."""
    of_queries = (ROWS, problem.seq, problem.heads, problem.head_dim)
    of_keys = (*of_queries[:2], problem.kv_heads, problem.head_dim)
    operands = normals(key, jnp.float32, of_queries, of_keys, of_keys, of_queries)
    operands = [x.astype(problem.dtype) for x in _towards_the_cap(operands, problem.scoring)]
    starts, group = _starts(problem, rows), problem.heads // problem.kv_heads
    results = _results(kernel, operands, starts, problem)
    # Of each result [rows, tokens, heads, ...] the number of its heads for a key head.
    widths = {"o": group, "lse": group, "dq": group, "dk": 1, "dv": 1}

    def heads_of(x: jax.Array, n: jax.Array, width: int) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(x, n * width, width, axis=2)

    def of_head(n: jax.Array) -> Distances:
        own = [heads_of(x, n, w) for x, w in zip(operands, (group, 1, 1, group), strict=True)]
        with jax.default_matmul_precision("highest"):
            wide = [x.astype(jnp.float32) for x in own]
            expected = _results(Blockwise(), wide, starts, problem)
        actual = {name: heads_of(x, n, widths[name]) for name, x in results.items()}
        return _compared(actual, expected, problem)

    distances = jax.lax.map(of_head, jnp.asarray(compared, jnp.int32))
    return {name: values.reshape(-1) for name, values in distances.items()}


def _compared(actual: Distances, expected: Distances, problem: AttentionProblem) -> Distances:
    """Returns the distances of a key head's results.

    Gradients of scores are differences p (dp - delta), which vanish for a query that sees one key;
    what rounding leaves is relative to p dp. Values and cotangents are normal numbers: so that has
    the norm of o for dq and of dv for dk, times scale * sqrt(head_dim).
    """
    seen = None
    if problem.merged:
        seen = expected["lse"] > MASKED / 2
        actual, expected = (_where_seen(results, seen) for results in (actual, expected))
    factor = problem.scoring.scale * problem.head_dim**0.5
    sizes = {name: _norms(x) for name, x in expected.items()}
    sizes["dq"] = jnp.maximum(sizes["dq"], factor * sizes["o"])
    sizes["dk"] = jnp.maximum(sizes["dk"], factor * sizes["dv"])
    if seen is not None:
        sizes["lse"] = _norms(seen)  # an error of the logarithm is a relative one of weights
    apart = {k: _norms(actual[k].astype(jnp.float32) - x) for k, x in expected.items()}
    return {name: distance(apart[name], sizes[name]) for name in expected}


def _where_seen(results: Distances, seen: jax.Array) -> Distances:
    """Returns results with zeros for the outputs of queries that see no key, which are any."""
    return {
        **results,
        "o": jnp.where(seen[..., None], results["o"], 0),
        "lse": jnp.where(seen, results["lse"], 0.0),
    }


def _norms(x: jax.Array) -> jax.Array:
    """[rows, tokens, heads, ...] -> norms [heads, parts]."""
    by_head = jnp.moveaxis(x.reshape(*x.shape[:3], -1), 2, 0)
    norms = part_norms(by_head)
    return norms.reshape(norms.shape[0], -1)


def _towards_the_cap(operands: list[jax.Array], scoring: Scoring) -> list[jax.Array]:
    """Returns q, k, v and do with logits around half of the softcap, where it counts, if it is not
    far from what logits are."""
    if scoring.softcap is None:
        return operands
    q, k, v, do = operands
    common = min((scoring.softcap / (2 * scoring.scale * q.shape[3])) ** 0.5, MOST_COMMON)
    return [q + common, k + common, v, do]


def _share(lse: jax.Array, problem: AttentionProblem) -> jax.Array:
    """Returns the weight of these keys among all, whose others have a log-sum-exp of 0; 1 for a
    device's own keys."""
    return jax.nn.sigmoid(lse) if problem.between else jnp.ones_like(lse)


def _results(
    kernel: Kernel, operands: list[jax.Array], starts: Located, problem: AttentionProblem
) -> dict[str, jax.Array]:
    """Returns the output and the gradients of a kernel; of a merged result the log-sum-exp too, and
    gradients as if the other keys of each query had a log-sum-exp of 0 and values of zeros."""
    q, k, v, do = operands
    scoring = problem.scoring
    if not problem.merged:
        assert callable(kernel), "layers call it"
        o, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, starts, scoring)[0], q, k, v)
        return {"o": o, **dict(zip(("dq", "dk", "dv"), pull(do.astype(o.dtype)), strict=True))}
    assert isinstance(kernel, FusedKernel), "methods of rows that are cut call its passes"
    o, lse = kernel.forward(q, k, v, starts, scoring)
    share = jnp.where(lse > MASKED / 2, _share(lse, problem), 0.0)[..., None]
    of_all = jnp.where(share > 0, o * share, 0.0).astype(o.dtype)
    total = jnp.logaddexp(lse, 0.0) if problem.between else lse
    saved = SavedAttention(q, k, v, starts, of_all, total)
    gradients = kernel.backward(saved, do, scoring)
    return {"o": o, "lse": lse, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


def _starts(problem: AttentionProblem, rows: jax.Array | None) -> Any:
    """Returns the document starts of queries and keys as a kernel takes them."""
    if rows is None or not problem.between:
        return rows
    return rows[:, problem.apart :], rows[:, : problem.seq]
