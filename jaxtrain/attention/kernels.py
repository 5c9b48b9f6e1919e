"""Attention, and the kernels that compute it: a reference, blockwise, cuDNN, splash.

A kernel is a value: called with (q, k, v, segments, scoring) it returns o. `choose` picks the
platform's own; any callable of that signature serves. Softmax attention is Vaswani et al. 2017,
grouped queries are Ainslie et al. 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.online_softmax import MASKED, AttentionMask, Scoring
from jaxtrain.collectives.vary import varying_axes

Segments = Int[Array, "batch seq"]
AttentionKernel = Callable[
    [jax.Array, jax.Array, jax.Array, Segments | None, Scoring],
    Float[Array, "batch seq heads head_dim"],
]

CPU_BLOCKS = Blockwise(query_block=64, key_block=512, chunk_bytes=2**20)
CPU_LONG_BLOCKS = Blockwise(query_block=128, key_block=256, chunk_bytes=2**20)
"""Measured; for seq up to 512, and above: a tile of scores stays in a core's cache."""

GPU_BLOCKS = Blockwise(query_block=256, key_block=512)
"""Not measured: larger tiles than elsewhere, for fewer kernels."""


def attention(
    q: Float[Array, "batch seq heads head_dim"],
    k: Float[Array, "batch seq kv_heads head_dim"],
    v: Float[Array, "batch seq kv_heads head_dim"],
    *,
    segments: Segments | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    kernel: AttentionKernel | None = None,
) -> Float[Array, "batch seq heads head_dim"]:
    """softmax(logits) v over the keys each query sees; logits = scale * q k^T, soft-capped.

    kv_heads divides heads; query head h reads key head h // (heads / kv_heads). Returns q's dtype;
    softmax and sums are fp32.
    segments: of which document each position is, int32; a query sees only keys of its own. 0 is
    padding, which sees only padding: outputs and gradients are finite everywhere.
    window w (causal only): keys i-w+1 .. i. softcap c: c * tanh(logits / c). scale: None is
    head_dim ** -0.5. kernel: None is `choose` for the default backend; state it when compiling for
    another platform. Raises ValueError for shapes that do not fit, every violation at once.
    """
    _check(q, k, v, segments, softcap)
    scoring = Scoring(
        AttentionMask(causal=causal, window=window),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        softcap=softcap,
    )
    kernel = PlatformKernel(jax.default_backend()) if kernel is None else kernel
    return kernel(q, k, v, segments, scoring)


def choose(
    platform: str,
    *,
    dtype: jax.typing.DTypeLike,
    seq: int,
    head_dim: int,
    segments: bool,
    softcap: bool = False,
    checked: bool = False,
) -> AttentionKernel:
    """The platform's own kernel where it computes what is asked, else `Blockwise`.

    The vendors' kernels are for 16-bit inputs: cuDNN has no others, and splash multiplies fp32 in
    bfloat16 passes. cuDNN is not taken with segments, which it would turn into a dense mask, nor
    splash inside a shard_map with `check_vma=True` (`checked`), which Pallas refuses.
    """
    half = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if platform == "tpu" and half and not checked and not Splash().violations(seq, head_dim):
        return Splash()
    if platform in ("gpu", "cuda"):
        if half and not segments and not softcap and not Cudnn().violations(head_dim):
            return Cudnn()
        return GPU_BLOCKS
    if platform == "cpu":
        return CPU_BLOCKS if seq <= 512 else CPU_LONG_BLOCKS
    return Blockwise()


@dataclass(frozen=True)
class PlatformKernel:
    """The kernel that `choose` picks for a platform, which need not be this machine's."""

    platform: str

    def __call__(
        self,
        q: Float[Array, "batch seq heads head_dim"],
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads head_dim"],
        segments: Segments | None,
        scoring: Scoring,
    ) -> Float[Array, "batch seq heads head_dim"]:
        kernel = choose(
            self.platform,
            dtype=q.dtype,
            seq=q.shape[1],
            head_dim=q.shape[3],
            segments=segments is not None,
            softcap=scoring.softcap is not None,
            checked=bool(varying_axes(q)),
        )
        return kernel(q, k, v, segments, scoring)


@dataclass(frozen=True)
class Reference:
    """The dense definition, seq x seq scores in fp32: the oracle of the others."""

    def __call__(
        self,
        q: Float[Array, "batch seq heads head_dim"],
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads head_dim"],
        segments: Segments | None,
        scoring: Scoring,
    ) -> Float[Array, "batch seq heads head_dim"]:
        batch, seq, heads, size = q.shape
        kv_heads = k.shape[2]
        dtype = q.dtype
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        grouped = q.reshape(batch, seq, kv_heads, heads // kv_heads, size)
        # b batch, h kv head, g query head of its group, q/k query and key position, d head_dim
        logits = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k) * scoring.scale
        if scoring.softcap is not None:
            logits = scoring.softcap * jnp.tanh(logits / scoring.softcap)
        at = jnp.arange(seq)
        visible = scoring.mask.visible(at[:, None], at[None])[None]
        if segments is not None:
            visible = visible & (segments[:, :, None] == segments[:, None, :])
        weights = jax.nn.softmax(jnp.where(visible[:, None, None], logits, MASKED), axis=-1)
        o = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v)
        return o.reshape(batch, seq, heads, size).astype(dtype)


@dataclass(frozen=True)
class Cudnn:
    """cuDNN's fused attention (GPU, 16-bit), through `jax.nn.dot_product_attention`.

    Raises ValueError for what it cannot compute: segments, a softcap, 32-bit inputs, a head_dim
    that is not a multiple of 8 or above 128.
    """

    def violations(self, head_dim: int) -> list[str]:
        fits = head_dim % 8 == 0 and head_dim <= 128
        return [] if fits else [f"head_dim={head_dim} is not a multiple of 8 up to 128"]

    def __call__(
        self,
        q: Float[Array, "batch seq heads head_dim"],
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads head_dim"],
        segments: Segments | None,
        scoring: Scoring,
    ) -> Float[Array, "batch seq heads head_dim"]:
        problems = self.violations(q.shape[3])
        if segments is not None:
            problems.append("segments would become a dense seq x seq mask")
        if scoring.softcap is not None:
            problems.append(f"softcap={scoring.softcap} is not supported")
        if q.dtype not in (jnp.bfloat16, jnp.float16):
            problems.append(f"dtype={q.dtype} is not bfloat16 or float16")
        _refuse("Cudnn", problems)
        window = scoring.mask.window
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            scale=scoring.scale,
            is_causal=scoring.mask.causal,
            local_window_size=None if window is None else (window - 1, 0),
            implementation="cudnn",
        )


@dataclass(frozen=True)
class Splash:
    """Pallas splash attention (TPU): skips the blocks that the mask hides, segments by id.

    block: queries and keys of a tile, forward and backward; at most seq. interpret: run the kernel
    in Python, for tests without a TPU. In a shard_map it needs `check_vma=False`, as Pallas does.
    Raises ValueError unless seq is a multiple of 128 and of `block`, and block of 128.
    """

    block: int = 512
    interpret: bool = False

    def violations(self, seq: int, head_dim: int) -> list[str]:
        found = []
        if seq % 128:
            found.append(f"seq={seq} is not a multiple of 128; pad to {seq + -seq % 128}")
        elif seq % min(self.block, seq) or self.block % 128:
            found.append(f"block={self.block} is not a multiple of 128 that divides seq={seq}")
        if head_dim % 64:
            found.append(f"head_dim={head_dim} is not a multiple of 64")
        return found

    def __call__(
        self,
        q: Float[Array, "batch seq heads head_dim"],
        k: Float[Array, "batch seq kv_heads head_dim"],
        v: Float[Array, "batch seq kv_heads head_dim"],
        segments: Segments | None,
        scoring: Scoring,
    ) -> Float[Array, "batch seq heads head_dim"]:
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        seq, heads = q.shape[1], q.shape[2]
        problems = self.violations(seq, q.shape[3])
        if varying_axes(q):
            problems.append("shard_map has check_vma=True, which Pallas refuses; set it False")
        _refuse("Splash", problems)
        kernel: Any = splash.make_splash_mha(
            splash.MultiHeadMask([_splash_mask(splash, scoring.mask, seq)] * heads),
            block_sizes=_splash_blocks(splash, min(self.block, seq)),
            attn_logits_soft_cap=scoring.softcap,
            residual_checkpoint_name="attention_out",
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )
        # The kernel has no scale of its own.
        scaled = (q.astype(jnp.float32) * scoring.scale).astype(q.dtype)
        q, k, v = (x.swapaxes(1, 2) for x in (scaled, k, v))
        if segments is None:
            o = jax.vmap(kernel)(q, k, v)
        else:
            pairs = splash.SegmentIds(q=segments, kv=segments)
            o = jax.vmap(lambda q, k, v, s: kernel(q, k, v, segment_ids=s))(q, k, v, pairs)
        return o.swapaxes(1, 2)


def _splash_mask(splash: ModuleType, mask: AttentionMask, seq: int) -> Any:
    """The mask as the module `splash_attention` writes it."""
    if mask.window is not None:
        return splash.LocalMask((seq, seq), window_size=(mask.window - 1, 0), offset=0)
    return splash.CausalMask((seq, seq)) if mask.causal else splash.FullMask((seq, seq))


def _splash_blocks(splash: ModuleType, block: int) -> Any:
    """Its sizes of tiles, all the same."""
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    return splash.BlockSizes(**{f"block_{name}": block for name in names})


def _refuse(kernel: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(
            f"attention kernel {kernel} cannot compute this: {'; '.join(problems)}; "
            "use kernel=Blockwise(), or None for the platform's choice"
        )


def _check(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None, softcap: float | None
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
    if segments is not None and segments.shape != q.shape[:2]:
        problems.append(f"segments {segments.shape} are not [batch, seq] {q.shape[:2]}")
    if softcap is not None and softcap <= 0:
        problems.append(f"softcap={softcap} is not above 0; use None for none")
    if problems:
        raise ValueError("attention: " + "; ".join(problems))
