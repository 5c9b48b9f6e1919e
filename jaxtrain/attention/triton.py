"""JAX's flash attention in Pallas, by way of Triton: for GPUs whose cuDNN takes no documents."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxtrain.attention.documents import Starts, TwoStarts
from jaxtrain.attention.fused import Attended, Heads, Keys, Saved, attend
from jaxtrain.attention.online_softmax import Scoring
from jaxtrain.attention.refusal import pallas_violations, refuse
from jaxtrain.violations import power_of_two, raise_violations

LN_2 = math.log(2)
"""The kernel's log-sum-exp is of powers of two."""


@dataclass(frozen=True)
class Triton:
    """Pallas-Triton flash attention (GPU): causal or not, documents by id, any number of them.

    Key heads are repeated for the queries that share them. block: queries and keys of a tile of the
    forward kernel; backward_block: of the backward one. interpret: run it in Python, for tests
    without a GPU. In a shard_map it needs `check_vma=False`, as Pallas does.
    Raises ValueError for blocks that are no powers of two, a window, a softcap, and a seq that the
    blocks do not divide.
    """

    runs_on: ClassVar[str] = "gpu"
    """The platform that it is of."""
    block: int = 128
    backward_block: int = 32
    interpret: bool = False

    def __post_init__(self) -> None:
        names = ("block", "backward_block")
        raise_violations([v for name in names for v in power_of_two(name, getattr(self, name))])

    def violations(self, seq: int, *, window: int | None, softcap: float | None) -> list[str]:
        """Returns the reasons why the kernel cannot compute this."""
        violations = []
        tiles = [min(block, seq) for block in (self.block, self.backward_block)]
        if any(seq % tile or tile & (tile - 1) for tile in tiles):
            sizes = f"block={self.block} and backward_block={self.backward_block}"
            violations.append(
                f"{sizes} do not both divide seq={seq}, which is no smaller power of two"
            )
        if window is not None:
            violations.append(f"window={window} is not supported")
        if softcap is not None:
            violations.append(f"softcap={softcap} is not supported")
        return violations

    def refusals(self, q: Heads, scoring: Scoring, *, documents: bool, between: bool) -> list[str]:
        window = scoring.mask.window
        refusals = self.violations(q.shape[1], window=window, softcap=scoring.softcap)
        if between and documents:
            refusals.append("documents between different places are not supported")
        return refusals + pallas_violations(q)

    def __call__(
        self, q: Heads, k: Keys, v: Keys, starts: Starts | None, scoring: Scoring
    ) -> Attended:
        documents = starts is not None
        refuse("Triton", self.refusals(q, scoring, documents=documents, between=False))
        return attend(self, q, k, v, starts, scoring)

    def forward(
        self, q: Heads, k: Keys, v: Keys, starts: Starts | TwoStarts | None, scoring: Scoring
    ) -> Attended:
        assert not isinstance(starts, tuple), "it takes the documents of queries for those of keys"
        k, v = (_repeat_heads(x, q) for x in (k, v))
        options = self._options(scoring, return_residuals=True)
        o, lse = _pallas().mha(q, k, v, starts, **options)
        return o, lse.swapaxes(1, 2) * LN_2

    def backward(self, saved: Saved, do: Heads, scoring: Scoring) -> tuple[Heads, Keys, Keys]:
        q, k, v, starts, o, lse = saved
        wide = (_repeat_heads(x, q) for x in (k, v))
        residuals = (q, *wide, starts, o, lse.swapaxes(1, 2) / LN_2)
        options = self._options(scoring, return_residuals=False)
        dq, dk, dv, _ = _pallas()._mha_backward(**options, res=residuals, do=do)
        return dq, _over_group(dk, k), _over_group(dv, v)

    def _options(self, scoring: Scoring, *, return_residuals: bool) -> dict[str, Any]:
        block, back = self.block, self.backward_block
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
            num_stages=2,
            grid=None,
            interpret=self.interpret,
            debug=False,
            return_residuals=return_residuals,
        )


def _pallas() -> ModuleType:
    with warnings.catch_warnings():
        # JAX 0.11 points to tokamax, which has more, and wants Python 3.12.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention

    return attention


def _repeat_heads(x: Keys, q: Heads) -> Heads:
    """Each key head once for every query head that reads it."""
    return jnp.repeat(x, q.shape[2] // x.shape[2], axis=2)


def _over_group(dx: Heads, like: Keys) -> Keys:
    """Adjoint of `_repeat_heads`, summed in fp32."""
    batch, seq, heads, size = like.shape
    wide = dx.reshape(batch, seq, heads, -1, size).astype(jnp.float32)
    return jnp.sum(wide, axis=3).astype(like.dtype)
