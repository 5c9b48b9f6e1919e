"""One model, three meanings: what a layer asks of the machine, and who answers.

A layer never names a mesh axis. `Local` (`local.py`) is the meaning on one device. `Gspmd`
(`gspmd.py`) states where values live and lets XLA choose the collectives. `Explicit`
(`explicit.py`) runs inside one shard_map in which every mesh axis is manual, and every collective
is a line of ours.

The residual stream is a matrix [rows * seq, embed]: XLA:CPU makes no gemm of a three-dimensional
dot (2.2x on a SwiGLU block), and a device's share (Korthikanti et al. 2022) is a slice of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int, PyTree

from jaxtrain.arrays import Arrays
from jaxtrain.attention.documents import ScoreInputs
from jaxtrain.attention.kernels import Attend
from jaxtrain.collectives.matmul import Tiled
from jaxtrain.collectives.vary import Index
from jaxtrain.nn.tiles import TiledProducts
from jaxtrain.quantization.formats import Scaled
from jaxtrain.quantization.recipe import Products
from jaxtrain.quantization.weights import Weights

CallQueries = Float[Array, "rows seq heads head_dim"]
CallKeys = Float[Array, "rows seq kv_heads head_dim"]
CallStarts = Int[Array, "rows row_seq"] | ScoreInputs | None
"""First position of each token's document; rows are complete even where the sequence is cut."""
RunExperts = Callable[..., jax.Array]
"""`moe.layer.ExpertLayer` of (x, leaves, facts of tokens, exchange)."""
Operand = jax.Array | Scaled
"""Of a weight's gradient: an array, or in 8 bits its numbers and scale."""
ExpertLeaves, TokenFacts = Any, Any
"""Types of `moe.layer`."""


class Adapter(NamedTuple):
    """Low-rank change of a matrix: x @ a * scale @ b is added to x @ w."""

    a: jax.Array
    b: jax.Array
    scale: float


@runtime_checkable
class Communicator(Protocol):
    """Operations that a layer may ask for. Shapes are those of one call: local in `Explicit`."""

    @property
    def grouped_matmul(self) -> Any:
        """Grouped product of experts' rows, as `moe.layer.ExpertLayer` takes it; None: the default
        backend's."""
        ...

    @property
    def quantized(self) -> Products | None:
        """How layers multiply by matrices in 8 bits; None: they do not."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """Tokens whose logits exist at one time, if the head's config has no `chunk_tokens`."""
        ...

    @property
    def tied_flops_per_byte(self) -> float | None:
        """FLOPs that the device computes while its link carries one byte of weights. None: permutes
        of weights are not tied to products (`overlap.alongside`)."""
        ...

    def gather(self, params: Arrays, prefix: str, x: PyTree) -> tuple[Weights, PyTree]:
        """Returns parameters as a layer uses them, and x. Weights are gathered over the axes that
        split them only at rest, and in the compute dtype or in 8 bits. The gather waits for x: so
        it keeps its place in the loop over microbatches and in the pass. Its adjoint is
        `scatter`."""
        ...

    def fetch(self, params: Arrays, prefix: str) -> Weights:
        """`gather` without a derivative, for loops that write out their own backward pass."""
        ...

    def scatter(self, grads: Arrays, prefix: str) -> Arrays:
        """Adjoint of `fetch`: sums gradients over those axes, each device keeping its part. Frozen
        leaves get none."""
        ...

    def frozen_of(self, params: Arrays, prefix: str) -> frozenset[str]:
        """Names below `prefix` of the leaves that are frozen and get no gradient."""
        ...

    def tiled_products(
        self, prefix: str, body_of: Callable[[Any], Callable[..., jax.Array]]
    ) -> TiledProducts | None:
        """Returns the weights below `prefix` whose gradients are scattered while they are computed;
        None if `scatter` scatters all. body_of: as in `TiledProducts`."""
        ...

    def column(self, x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        """x @ w for weights split by column: [tokens, embed] -> [tokens, part of the columns]."""
        ...

    def row(self, x: jax.Array, weight: jax.Array, adapter: Adapter | None = None) -> jax.Array:
        """x @ w for a weight split by row, with its adapter's change. The result is the residual
        stream's share of the sum."""
        ...

    def multiply(self, x: jax.Array, weight: jax.Array) -> jax.Array:
        """x @ w of local arrays, without communication."""
        ...

    def column_gradients(
        self, x: Operand, *dys: Operand, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        """Gradients of the weights of `column`, from its input x and the cotangents dys of its
        outputs. tiled: an entry for each weight; where it is not None, the result is this device's
        tile of the gradient."""
        ...

    def row_gradients(
        self, x: Operand, dy: Operand, *, tiled: Sequence[Tiled | None] = ()
    ) -> tuple[jax.Array, ...]:
        """Gradient of the weight of `row` from its x and its output's cotangent."""
        ...

    def embed(self, vectors: jax.Array, ids: jax.Array) -> jax.Array:
        """Rows `ids` [tokens] of the table [vocab, embed]."""
        ...

    def attend(
        self, kernel: Attend, q: CallQueries, k: CallKeys, v: CallKeys, starts: CallStarts
    ) -> CallQueries:
        """kernel(q, k, v, starts) on each device's rows and heads. Where a device has only a part
        of the sequence, the kernel must be a `SelfAttention` of attention/ and gets more
        arguments."""
        ...

    def positions(self, seq: int) -> Int[Array, " seq"]:
        """Positions in their row of the `seq` tokens of a row that one call sees."""
        ...

    def row_seq(self, seq: int) -> int:
        """Tokens of a whole row, of which one call sees `seq`."""
        ...

    def experts(
        self, layer: RunExperts, x: jax.Array, leaves: ExpertLeaves, facts: TokenFacts
    ) -> jax.Array:
        """layer(x, leaves, facts, exchange) for x [tokens, embed], the residual stream's share.
        Experts' matrices are split over their hidden dim. facts: of all tokens."""
        ...

    def tokens(self, per_token: jax.Array) -> jax.Array:
        """Slice of a per-token array [tokens, ...] that belongs to the residual stream's share."""
        ...

    def all_tokens(self, x: jax.Array) -> jax.Array:
        """Gathers the tokens of all devices that have a share [tokens share, dim] of them.
        Gradients are summed over these devices, as those of `column`'s x are."""
        ...

    def scatter_head_gradient(self, dx: jax.Array) -> jax.Array:
        """Adjoint of `all_tokens` if every device holds a part of the sum."""
        ...

    def vocab_offset(self, local: int) -> Index:
        """First id of this device's slice of the vocabulary."""
        ...

    def head_offset(self, local: int) -> Index:
        """Number of the first of the `local` attention heads that one call sees."""
        ...

    def sum_over_heads(self, squares: jax.Array) -> jax.Array:
        """Sum over the devices that split the heads. squares [tokens, ...]: each device's part.
        Differentiable."""
        ...

    def sum_over_vocab(self, x: jax.Array) -> jax.Array: ...

    def sum_over_row(self, x: jax.Array) -> jax.Array: ...

    def max_over_vocab(self, x: jax.Array) -> jax.Array: ...

    def vocab_ways(self) -> int: ...

    def chunks(self, per_token: jax.Array, count: int, *, rows: int) -> jax.Array:
        """[tokens, ...] -> [count, tokens / count, ...], every chunk spread over all devices;
        `count` divides tokens / rows."""
        ...

    def unchunk(self, chunked: jax.Array, *, rows: int) -> jax.Array:
        """Inverse of `chunks`."""
        ...

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """States the logical axes of an activation; `batch*seq` names merged tokens."""
        ...
