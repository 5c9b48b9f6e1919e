"""Pallas splash attention, the TPUs' fused kernel."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxtrain.attention.documents import Starts, TwoStarts
from jaxtrain.attention.fused import Attended, Keys, Query, SavedAttention, attend
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.refusal import function_violations, pallas_violations, refuse
from jaxtrain.violations import count, raise_violations


@dataclass(frozen=True)
class SplashBlocks:
    """Rows and columns of splash's tiles, each at most seq.

    q, kv: of the forward kernel. kv_compute: of the keys of a tile it fetches, how many it
    multiplies at a time.
    q_dkv, kv_dkv, kv_dkv_compute: the same of the kernel for the gradients of keys and values.
    q_dq, kv_dq: of that for the gradients of queries.
    fused_backward: one kernel makes all gradients, and q_dq and kv_dq are not read. Queries'
      gradients are then parts, one a tile of keys, that are summed after: seq / kv_dkv times their
      memory.
    """

    q: int = 512
    kv: int = 512
    kv_compute: int = 512
    q_dkv: int = 512
    kv_dkv: int = 512
    kv_dkv_compute: int = 512
    q_dq: int = 512
    kv_dq: int = 512
    fused_backward: bool = False

    def __post_init__(self) -> None:
        sizes = (f.name for f in fields(self) if f.name != "fused_backward")
        raise_violations([v for name in sizes for v in count(name, getattr(self, name))])

    def sizes(self) -> dict[str, int]:
        """Returns each size that the kernel reads, by name."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "fused_backward"}
        return {k: n for k, n in sizes.items() if not (self.fused_backward and k.endswith("_dq"))}


def blocks_for(seq: int, head_dim: int) -> SplashBlocks:
    """Tiles of up to 1024 (512 above head_dim 128), as far as they divide seq, and one backward
    kernel where its parts are 8 or fewer: as public tuned configurations have them. Compiled for
    v5e, v5p and v6e with head_dim 128 and 256, where twice the size does not fit into VMEM on all
    of them; not measured."""
    sizes = (1024, 512, 256) if head_dim <= 128 else (512, 256)
    size = next((size for size in sizes if seq % size == 0), 128)
    compute = min(size, 512)
    return SplashBlocks(
        *(size, size, compute),
        *(size, size, compute),
        *(size, size),
        fused_backward=seq <= 8 * size,
    )


@dataclass(frozen=True)
class Splash:
    """Pallas splash attention (TPU): skips the blocks that the mask hides, documents by id.

    blocks: sizes of tiles; None is `blocks_for` the seq. interpret: run the kernel in Python, for
    tests without a TPU. In a shard_map it needs `check_vma=False`, as Pallas does. Raises
    ValueError unless seq is a multiple of 128 and of every size, and head_dim of 64.
    """

    runs_on: ClassVar[str] = "tpu"
    """The platform that it is of."""
    blocks: SplashBlocks | None = None
    interpret: bool = False

    def violations(self, seq: int, head_dim: int) -> list[str]:
        """Returns the reasons why the kernel cannot compute this."""
        violations = []
        if seq % 128:
            violations.append(f"seq={seq} is not a multiple of 128; pad to {seq + -seq % 128}")
        else:
            violations += [
                f"blocks.{name}={size} is not a multiple of 128 that divides seq={seq}"
                for name, size in (self.blocks or blocks_for(seq, head_dim)).sizes().items()
                if size % 128 or seq % min(size, seq)
            ]
        if head_dim % 64:
            violations.append(f"head_dim={head_dim} is not a multiple of 64")
        return violations

    def refusals(self, q: Query, scoring: Scoring, *, documents: bool, between: bool) -> list[str]:
        violations = self.violations(q.shape[1], q.shape[3]) + function_violations(scoring)
        return violations + pallas_violations(q)

    def __call__(
        self, q: Query, k: Keys, v: Keys, starts: Starts | None, scoring: Scoring
    ) -> Attended:
        documents = starts is not None
        refuse("Splash", self.refusals(q, scoring, documents=documents, between=False))
        return attend(self, q, k, v, starts, scoring)

    def forward(
        self, q: Query, k: Keys, v: Keys, starts: Starts | TwoStarts | None, scoring: Scoring
    ) -> Attended:
        kernel = self._kernel(q, scoring)

        def one(q: jax.Array, k: jax.Array, v: jax.Array, *starts: jax.Array) -> Any:
            return kernel(q, k, v, segment_ids=_ids(starts))

        arrays = _by_heads(_scaled(q, scoring), k, v)
        o, (lse,) = jax.vmap(one)(*arrays, *_documents(starts))
        return o.swapaxes(1, 2), lse.swapaxes(1, 2)

    def backward(
        self, saved: SavedAttention, do: Query, scoring: Scoring
    ) -> tuple[Query, Keys, Keys]:
        """The kernel keeps its derivative to itself where it gives the log-sum-exp: what stands
        below it is called."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

        q, k, v, starts, o, lse = saved
        kernel = self._kernel(q, scoring)
        infos = (kernel.dq_mask_info, kernel.dkv_mask_info)
        options: dict[str, Any] = {**kernel.kwargs, "save_residuals": False}

        def one(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            q, k, v, o, lse, do, *starts = arrays
            residuals = (q, k, v, _ids(starts), None, o, lse, *infos)
            grads = splash_attention_kernel._splash_attention_bwd(**options, res=residuals, do=do)
            return grads[3:6]

        arrays = _by_heads(_scaled(q, scoring), k, v, o, lse, do)
        dq, dk, dv = jax.vmap(one)(*arrays, *_documents(starts))
        dq = (dq.astype(jnp.float32) * scoring.scale).astype(q.dtype)
        return dq.swapaxes(1, 2), dk.swapaxes(1, 2), dv.swapaxes(1, 2)

    def _kernel(self, q: Query, scoring: Scoring) -> Any:
        from jax.experimental.pallas.ops.tpu import splash_attention as splash

        seq, heads = q.shape[1], q.shape[2]
        blocks = self.blocks or blocks_for(seq, q.shape[3])
        read = blocks.sizes().items()
        sizes: dict[str, Any] = {f"block_{name}": min(size, seq) for name, size in read}
        fused = blocks.fused_backward
        return splash.make_splash_mha(
            splash.MultiHeadMask([_mask(splash, scoring.mask, seq)] * heads),
            block_sizes=splash.BlockSizes(**sizes, use_fused_bwd_kernel=fused),
            attn_logits_soft_cap=scoring.softcap,
            save_residuals=True,
            head_shards=1,
            q_seq_shards=1,
            interpret=self.interpret,
        )


def _scaled(q: Query, scoring: Scoring) -> Query:
    """The kernel has no scale of its own."""
    return (q.astype(jnp.float32) * scoring.scale).astype(q.dtype)


def _by_heads(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """[batch, heads, seq, ...]."""
    return tuple(x.swapaxes(1, 2) for x in arrays)


def _documents(starts: Starts | TwoStarts | None) -> tuple[jax.Array, ...]:
    """Starts of queries, and of keys where they are others."""
    return () if starts is None else starts if isinstance(starts, tuple) else (starts,)


def _ids(starts: Any) -> Any:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    return splash.SegmentIds(q=starts[0], kv=starts[-1]) if starts else None


def _mask(splash: ModuleType, mask: AttentionMask, seq: int) -> Any:
    """The mask as the module `splash_attention` writes it."""
    if mask.window is not None:
        return splash.LocalMask((seq, seq), (mask.window - 1, 0), mask.offset)
    if mask.causal:
        return splash.CausalMask((seq, seq), mask.offset)
    return splash.FullMask((seq, seq))
