"""JAX's flash attention in Pallas, by way of Triton: for GPUs whose cuDNN takes no documents."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxtrain.attention.documents import Starts, TwoStarts
from jaxtrain.attention.fused import Attended, Keys, Query, SavedAttention, attend
from jaxtrain.attention.online_softmax import Scoring
from jaxtrain.attention.refusal import function_violations, pallas_violations, refuse
from jaxtrain.backends import HOPPER_SHARED_BYTES, TRITON, TRITON_ATTENTION, missing
from jaxtrain.violations import power_of_two, raise_violations

LN_2 = math.log(2)
"""The kernel's log-sum-exp is of powers of two."""

STAGES = 2
"""Tiles of keys and of values that the kernel has in memory at a time: one is multiplied while the
next is read."""

SHARED_BYTES = {"A100": 163 * 2**10, "H100": HOPPER_SHARED_BYTES}
"""Shared memory of a block of threads (CUDA C++ programming guide, compute capability 8.0, 9.0)."""

LEAST_BLOCK, LARGEST_BLOCK = 16, 128
"""Of a tile: tensor cores multiply 16 rows at a time."""


@dataclass(frozen=True)
class Triton:
    """Pallas-Triton flash attention (GPU): causal or not, documents by id, any number of them.

    Key heads are repeated for the queries that share them. block: queries and keys of a tile of the
    forward kernel, None for 128, or for less where that does not fit the shared memory of an A100
    (64 for a head_dim from 129 to 256); backward_block: of the backward ones. interpret: run it in
    Python, for tests without a GPU. In a shard_map it needs `check_vma=False`, as Pallas does.
    Raises ValueError for blocks that are no powers of two, a window, a softcap, a seq that the
    blocks do not divide, and tiles larger than the shared memory of an H100.
    """

    runs_on: ClassVar[str] = "gpu"
    """The platform that it is of."""
    block: int | None = None
    backward_block: int = 32
    interpret: bool = False

    def __post_init__(self) -> None:
        sizes = {"block": self.block, "backward_block": self.backward_block}
        stated = {name: size for name, size in sizes.items() if size is not None}
        raise_violations([v for name, size in stated.items() for v in power_of_two(name, size)])

    def block_of(self, head_dim: int) -> int:
        """Returns the block of the forward kernel."""
        if self.block is not None:
            return self.block
        return largest_block(forward_bytes, head_dim, SHARED_BYTES["A100"]) or LEAST_BLOCK

    def violations(
        self, seq: int, head_dim: int, *, window: int | None, softcap: float | None
    ) -> list[str]:
        """Returns the reasons why the kernel cannot compute this."""
        violations, block = [*missing(TRITON, TRITON_ATTENTION)], self.block_of(head_dim)
        tiles = [min(size, seq) for size in (block, self.backward_block)]
        if any(seq % tile or tile & (tile - 1) for tile in tiles):
            sizes = f"block={block} and backward_block={self.backward_block}"
            violations.append(
                f"{sizes} do not both divide seq={seq}, which is no smaller power of two"
            )
        if not self.interpret:
            violations += _too_large("block", forward_bytes, tiles[0], head_dim)
            violations += _too_large("backward_block", backward_bytes, tiles[1], head_dim)
        if window is not None:
            violations.append(f"window={window} is not supported")
        if softcap is not None:
            violations.append(f"softcap={softcap} is not supported")
        return violations

    def refusals(self, q: Query, scoring: Scoring, *, documents: bool, between: bool) -> list[str]:
        window = scoring.mask.window
        refusals = self.violations(*q.shape[1::2], window=window, softcap=scoring.softcap)
        refusals += function_violations(scoring)
        if between and documents:
            refusals.append("documents between different places are not supported")
        return refusals + pallas_violations(q)

    def __call__(
        self, q: Query, k: Keys, v: Keys, starts: Starts | None, scoring: Scoring
    ) -> Attended:
        documents = starts is not None
        refuse("Triton", self.refusals(q, scoring, documents=documents, between=False))
        return attend(self, q, k, v, starts, scoring)

    def forward(
        self, q: Query, k: Keys, v: Keys, starts: Starts | TwoStarts | None, scoring: Scoring
    ) -> Attended:
        assert not isinstance(starts, tuple), "it takes the documents of queries for those of keys"
        k, v = (_repeat_heads(x, q) for x in (k, v))
        options = self._options(scoring, q.shape[3], return_residuals=True)
        o, lse = _pallas().mha(q, k, v, starts, **options)
        return o, lse.swapaxes(1, 2) * LN_2

    def backward(
        self, saved: SavedAttention, do: Query, scoring: Scoring
    ) -> tuple[Query, Keys, Keys]:
        q, k, v, starts, o, lse = saved
        wide = (_repeat_heads(x, q) for x in (k, v))
        residuals = (q, *wide, starts, o, lse.swapaxes(1, 2) / LN_2)
        options = self._options(scoring, q.shape[3], return_residuals=False)
        dq, dk, dv, _ = _pallas()._mha_backward(**options, res=residuals, do=do)
        return dq, _over_group(dk, k), _over_group(dv, v)

    def _options(
        self, scoring: Scoring, head_dim: int, *, return_residuals: bool
    ) -> dict[str, Any]:
        block, back = self.block_of(head_dim), self.backward_block
        sizes = _pallas().BlockSizes(
            block_q=block,
            block_k=block,
            block_q_dkv=back,
            block_kv_dkv=back,
            block_q_dq=back,
            block_kv_dq=back,
        )
        return dict(
            sm_scale=scoring.scale,
            causal=scoring.mask.causal,
            block_sizes=sizes,
            backward_pass_impl="triton",
            num_warps=None,
            num_stages=STAGES,
            grid=None,
            interpret=self.interpret,
            debug=False,
            return_residuals=return_residuals,
        )


def forward_bytes(block: int, head_dim: int) -> int:
    """Returns the bytes of shared memory of the forward kernel on an H100, as its compiler counts
    them: a tile of queries, `STAGES` tiles of keys and of values, whose head_dim is padded to a
    power of two, and a number per query. All 16-bit but the last."""
    return 2 * (1 + 2 * STAGES) * block * _padded(head_dim) + 4 * block


def backward_bytes(block: int, head_dim: int) -> int:
    """Returns the bytes of shared memory of the larger backward kernel on an H100, as its compiler
    counts them at most: two tiles that stay, `STAGES` of two others, scores, and three numbers per
    query."""
    return 2 * (2 + 2 * STAGES) * block * _padded(head_dim) + 2 * block * block + 12 * block


def _padded(head_dim: int) -> int:
    return 1 << (head_dim - 1).bit_length()


def largest_block(needed: Callable[[int, int], int], head_dim: int, available: int) -> int | None:
    """Returns the largest block whose tiles fit in `available` bytes; None if none does. needed:
    bytes of a block and a head_dim."""
    block = LARGEST_BLOCK
    while block >= LEAST_BLOCK and needed(block, head_dim) > available:
        block //= 2
    return block if block >= LEAST_BLOCK else None


def _too_large(name: str, needed: Callable[[int, int], int], tile: int, head_dim: int) -> list[str]:
    """Violation if the tiles of a kernel do not fit in the shared memory of an H100."""
    available = SHARED_BYTES["H100"]
    if needed(tile, head_dim) <= available:
        return []
    fits = largest_block(needed, head_dim, available)
    return [
        f"{name}={tile} with head_dim={head_dim} takes {needed(tile, head_dim)} bytes of shared "
        f"memory, of which an H100 has {available}; "
        + (f"{name}={fits} fits" if fits else "no block fits")
    ]


def _pallas() -> ModuleType:
    with warnings.catch_warnings():
        # JAX 0.11 points to tokamax, which has more, and wants Python 3.12.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    return attention


def _repeat_heads(x: Keys, q: Query) -> Query:
    """Each key head once for every query head that reads it."""
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _over_group(dx: Query, like: Keys) -> Keys:
    """Adjoint of `_repeat_heads`, summed in fp32."""
    batch, seq, heads, size = like.shape
    wide = dx.reshape(batch, seq, heads, -1, size).astype(jnp.float32)
    return jnp.sum(wide, axis=3).astype(like.dtype)
