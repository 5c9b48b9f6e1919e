"""Attention, its dense reference, and which kernel computes it where.

A kernel is a value: called with (q, k, v, starts, scoring) it returns o and the log-sum-exp of each
query's logits, fp32 [batch, seq, heads], a constant to derivatives. starts are `documents.Located`.
`choose` picks the platform's own; any callable of that signature serves. Softmax attention is
Vaswani et al. 2017, grouped queries are Ainslie et al. 2023.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.cudnn import GPU_BLOCKS, Cudnn
from jaxtrain.attention.documents import Located, ScoreInputs, Starts, documents_of
from jaxtrain.attention.fused import Attended, Keys, Query
from jaxtrain.attention.online_softmax import MASKED, AttentionMask, Scoring
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.triton import Triton
from jaxtrain.backends import gpu_capability
from jaxtrain.collectives.vary import varying_axes
from jaxtrain.scores.function import ScoreFunction, dense

Attend = Callable[..., jax.Array]
"""(q, k, v, starts) -> o; a `SelfAttention` where rows are split, which gets more arguments."""

AttentionKernel = Callable[[jax.Array, jax.Array, jax.Array, Any, Scoring], Attended]

CPU_BLOCKS = Blockwise(query_block=64, key_block=512, chunk_bytes=2**20)
CPU_LONG_BLOCKS = Blockwise(query_block=128, key_block=256, chunk_bytes=2**20)
"""Measured; for seq up to 512, and above: a tile of scores stays in a core's cache."""


def attention(
    q: Query,
    k: Keys,
    v: Keys,
    *,
    starts: Starts | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    kernel: AttentionKernel | None = None,
) -> Query:
    """softmax(logits) v over the keys each query sees; logits = scale * q k^T, soft-capped.

    kv_heads divides heads; query head h reads key head h // (heads / kv_heads). Returns q's dtype;
    softmax and sums are fp32.
    starts: of each position the first of its document, int32, as `document_starts` has them; a
    query sees only keys of its own document. Padding is one too: outputs and gradients are finite
    everywhere. None: a row is one document.
    window w (causal only): keys i-w+1 .. i. softcap c: c * tanh(logits / c). scale: None is
    head_dim ** -0.5. kernel: None is `choose` for the default backend; state it when compiling for
    another platform. Raises ValueError for shapes that do not fit, every violation at once.
    """
    return SelfAttention(causal, window, softcap, scale, kernel)(q, k, v, starts)


@dataclass(frozen=True)
class SelfAttention:
    """`attention` with its options, as a value: what a communicator is given, which may have only a
    part of a row on each device (context/). causal, window, softcap, scale, kernel: as `attention`
    has them. scores: a function of each logit, None for none."""

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    kernel: AttentionKernel | None = None
    scores: ScoreFunction | None = None

    def __call__(self, q: jax.Array, k: jax.Array, v: jax.Array, starts: Located) -> jax.Array:
        """starts: from `located` if scores have a function."""
        documents: Any = documents_of(starts)
        self.check(q, k, v, documents)
        self.check_located(starts)
        return self.settled_kernel(q, k, v, starts, self.scoring(q.shape[3]))[0]

    @property
    def settled_kernel(self) -> AttentionKernel:
        return _kernel_here() if self.kernel is None else self.kernel

    def scoring(self, head_dim: int) -> Scoring:
        mask = AttentionMask(causal=self.causal, window=self.window)
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return Scoring(mask, scale=scale, softcap=self.softcap, function=self.scores)

    def located(
        self, starts: Starts | None, values: jax.Array | None
    ) -> Starts | ScoreInputs | None:
        """Returns document starts with what the function of scores needs, if there is one. values:
        entries of its `of_heads` for the heads of the call, learned or not. On a device they begin
        with the model's head `Communicator.head_offset`."""
        if self.scores is None or values is None:
            return starts
        learned = jnp.issubdtype(values.dtype, jnp.floating)
        return ScoreInputs(starts, values.astype(jnp.float32) if learned else values)

    def check_located(self, starts: Located) -> None:
        """Raises ValueError if scores have a function and `starts` nothing for it."""
        if self.scores is not None and not isinstance(starts, ScoreInputs):
            raise ValueError(
                f"attention with scores={self.scores} was given no values of heads; give it "
                "located(starts, values) in the place of starts"
            )

    def check(
        self, q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None = None
    ) -> None:
        """Raises ValueError for shapes that do not fit, every violation at once."""
        _check(q, k, v, starts, self.softcap)


def choose(
    platform: str,
    *,
    dtype: jax.typing.DTypeLike,
    seq: int,
    head_dim: int,
    documents: bool,
    window: int | None = None,
    softcap: float | None = None,
    function: bool = False,
    checked: bool = False,
    capability: int | None = None,
) -> AttentionKernel:
    """The platform's fastest kernel that computes what is asked, else `Blockwise`.

    documents: whether rows are packed. function: whether scores have one. checked: in a shard_map
    with `check_vma=True`, which Pallas refuses. capability: the major compute capability of the
    GPU: cuDNN takes packed documents from 9 (Hopper) on, and None, where it is not known, is taken
    for less. The vendors' kernels are for 16-bit inputs: cuDNN has no others, and splash multiplies
    fp32 in bfloat16 passes.
    """
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16) and not function
    if platform == "tpu" and half and not checked and not Splash().violations(seq, head_dim):
        return Splash()
    if platform in ("gpu", "cuda"):
        if not half:
            return GPU_BLOCKS
        packs = not documents or (capability is not None and capability >= 9)
        if packs and not Cudnn().violations(head_dim, softcap=softcap, dtype=dtype):
            return Cudnn()
        options = dict(window=window, softcap=softcap)
        if not checked and not Triton().violations(seq, head_dim, **options):
            return Triton(block=Triton().block_of(head_dim))
        return GPU_BLOCKS
    if platform == "cpu":
        return CPU_BLOCKS if seq <= 512 else CPU_LONG_BLOCKS
    return Blockwise()


@dataclass(frozen=True)
class PlatformKernel:
    """The kernel that `choose` picks for a platform, which need not be this machine's. capability:
    of its GPU, as `choose` takes it. Warns where that is `Blockwise` on an accelerator."""

    platform: str
    capability: int | None = None

    def __call__(self, q: Query, k: Keys, v: Keys, starts: Located, scoring: Scoring) -> Attended:
        kernel = self.settled(q, scoring, documents=documents_of(starts) is not None)
        if isinstance(kernel, Blockwise) and self.platform != "cpu":
            warnings.warn(portable(self.platform, q, scoring), stacklevel=2)
        return kernel(q, k, v, starts, scoring)

    def settled(self, q: Query, scoring: Scoring, *, documents: bool) -> AttentionKernel:
        """The kernel for queries like q."""
        return choose(
            self.platform,
            dtype=q.dtype,
            seq=q.shape[1],
            head_dim=q.shape[3],
            documents=documents,
            window=scoring.mask.window,
            softcap=scoring.softcap,
            function=scoring.function is not None,
            checked=bool(varying_axes(q)),
            capability=self.capability,
        )


def _kernel_here() -> PlatformKernel:
    """Returns the choice for the default backend and the compute capability of its first device."""
    return PlatformKernel(jax.default_backend(), gpu_capability())


def portable(platform: str, q: Query, scoring: Scoring, refusals: Sequence[str] = ()) -> str:
    """Returns a warning that `Blockwise` runs on an accelerator, with the reasons and its cost.
    refusals: of the kernel that was named; without any those of the platform's are told."""
    reasons = refusals or _refusals_of(platform, q, scoring)
    return (
        f"attention of {q.dtype} with head_dim={q.shape[3]}, seq={q.shape[1]} has no fused kernel "
        f"for {platform} here ({'; '.join(reasons) or 'check_vma=True, which Pallas refuses'}) and "
        "runs as loops of XLA's over tiles: several times the time of a fused one, on an H100 8 "
        "times"
    )


def _refusals_of(platform: str, q: Query, scoring: Scoring) -> list[str]:
    """Returns why no kernel of the platform's own computes this."""
    dtype, seq, size = q.dtype, q.shape[1], q.shape[3]
    if scoring.function is not None:
        return [f"scores={scoring.function} is a function"]
    if dtype not in (jnp.bfloat16, jnp.float16):
        return [f"dtype={dtype} is not bfloat16 or float16"]
    if platform == "tpu":
        return Splash().violations(seq, size)
    options = dict(window=scoring.mask.window, softcap=scoring.softcap)
    of_cudnn = Cudnn().violations(size, softcap=scoring.softcap, dtype=dtype)
    return of_cudnn + Triton().violations(seq, size, **options)


@dataclass(frozen=True)
class Reference:
    """The dense definition, seq x seq scores in fp32: the oracle of the others."""

    def __call__(self, q: Query, k: Keys, v: Keys, starts: Located, scoring: Scoring) -> Attended:
        batch, seq, heads, size = q.shape
        kv_heads = k.shape[2]
        dtype = q.dtype
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, size)
        # b batch, h kv head, g query head of its group, q/k query and key position, d head_dim
        logits = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k) * scoring.scale
        if scoring.softcap is not None:
            logits = scoring.softcap * jnp.tanh(logits / scoring.softcap)
        positions, documents = jnp.arange(seq), documents_of(starts)
        assert not isinstance(documents, tuple), "the reference has whole rows"
        visible = scoring.mask.visible(positions[:, None], positions[None])[None]
        if documents is not None:
            visible = visible & (documents[:, :, None] == documents[:, None, :])
        if isinstance(starts, ScoreInputs) and scoring.function is not None:
            places = starts.places(batch, seq)
            logits = dense(scoring.function, logits, starts.heads, places, visible)
        logits = jnp.where(visible[:, None, None], logits, MASKED)
        o = jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(logits, axis=-1), v)
        lse = jax.nn.logsumexp(lax.stop_gradient(logits), axis=-1)
        lse = jnp.moveaxis(lse.reshape(batch, heads, seq), 1, 2)
        return o.reshape(batch, seq, heads, size).astype(dtype), lse


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None, softcap: float | None
) -> None:
    problems = []
    if q.ndim != 4 or k.ndim != 4:
        problems.append(f"q and k are [batch, seq, heads, head_dim], found {q.shape}, {k.shape}")
    elif (q.shape[:2], q.shape[3]) != (k.shape[:2], k.shape[3]):
        problems.append(f"q {q.shape} and k {k.shape} differ in batch, seq or head_dim")
    elif q.shape[2] % k.shape[2]:
        problems.append(
            f"heads={q.shape[2]} is not a multiple of kv_heads={k.shape[2]}; use kv_heads="
            f"{math.gcd(q.shape[2], k.shape[2])}"
        )
    if v.shape != k.shape:
        problems.append(f"k {k.shape} and v {v.shape} differ")
    if not q.dtype == k.dtype == v.dtype:
        problems.append(f"q {q.dtype}, k {k.dtype} and v {v.dtype} are not of one dtype")
    if starts is not None and starts.shape != q.shape[:2]:
        problems.append(f"starts {starts.shape} are not [batch, seq] {q.shape[:2]}")
    if softcap is not None and softcap <= 0:
        problems.append(f"softcap={softcap} is not above 0; use None for none")
    if problems:
        raise ValueError("attention: " + "; ".join(problems))
