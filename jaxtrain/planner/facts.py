"""Plain values from which a step is predicted: sizes, splits and policies."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtrain.mesh.axes import Dims
from jaxtrain.mesh.roles import Roles
from jaxtrain.models.description import ModelDescription
from jaxtrain.moe.room import chunk_count


@dataclass(frozen=True)
class LeafFacts:
    """A parameter: its global shape, NumPy's name of its dtype, and its splits at rest, in the
    optimizer and in use.
    stacked: how many dims count layers, chunks or experts; a leaf with fewer than two other dims is
      used in its own dtype. trained: False if the leaf has no gradient.
    """

    shape: tuple[int, ...]
    dtype: str
    params: Dims
    optimizer: Dims
    in_use: Dims
    stacked: int
    trained: bool = True


@dataclass(frozen=True)
class LoopFacts:
    """Settings of the loop over layers: `nn.stack.LayerLoop`'s fields, and `Execution`'s
    `expert_chunk`.
    keeps_last: with prefetch, the last layer's weights are kept for the backward pass.
    """

    unroll: bool
    remat: str
    prefetch: bool
    reshard: bool
    keeps_last: bool = False
    expert_chunk: int | None = None

    def fetched_again(self, layers: int) -> int:
        """Number of times the backward pass of a stack of `layers` gathers a layer's weights.
        A prefetching loop gathers once more than others: its last turn fetches for a turn that does
        not come. (A compiler does not treat a loop of one turn as a loop, and drops what is not
        used.)
        """
        if not self.reshard:
            return 0
        ahead = self.prefetch and not self.unroll
        return layers + (ahead and layers > 2) - (ahead and self.keeps_last)


@dataclass(frozen=True)
class SumFacts:
    """Settings of the sum of gradients over the mesh axes on which a leaf is replicated.

    slow: the algorithm over all those axes together. If `fast` names an algorithm too, the sum is
      hierarchical: `slow` sums over the first axis and `fast` over the others.
    rounded: in bfloat16, by an all-to-all of the terms and an all-gather of the sums.
    small_leaf: leaves of up to this many elements are summed in one bucket.
    by_layer: stacked leaves are summed in the backward pass.
    apart: leaves that a compressed reducer handles; none of them is in a bucket. encoded: for each
      leaf sent as a code, the bytes of a tile's code. factors: for each leaf summed by PowerSGD,
      the elements of its two factors. The other leaves of `apart` are summed by `slow`.
    """

    slow: str
    fast: str | None
    small_leaf: int
    by_layer: bool
    rounded: bool = False
    apart: Set[str] = frozenset()
    encoded: Mapping[str, int] = field(default_factory=dict)
    factors: Mapping[str, tuple[int, int]] = field(default_factory=dict)


class SequenceFacts(NamedTuple):
    """Numbers that say how attention works on rows split over devices (`context.methods`).

    axes: mesh axes that split rows. local: tokens of a row on a device. group: devices that trade
      tokens for heads, 1 for none. groups: number of these groups; several form a ring. zigzag: the
      order of tokens (`context.order`). gathered: keys are gathered and do not travel.
    """

    axes: tuple[str, ...]
    local: int
    groups: int
    group: int
    zigzag: bool
    gathered: bool


class Algorithms(NamedTuple):
    """Algorithms of the collectives, named as in `collectives.cost.steps.SCHEDULES`.

    fsdp, tensor, weight_gradients: `Collectives`' fields; weight_gradients defaults to `fsdp`'s
    algorithm. tiled: gradients of the stack's products are scattered while they are
    computed. experts: algorithm that sends rows to the devices of their experts; "ragged" sends no
    padding. context: None if rows are not split.
    """

    fsdp: str
    tensor: str
    weight_gradients: str
    tiled: bool
    experts: str
    context: SequenceFacts | None = None


class LeafSumFacts(NamedTuple):
    """A sum over dims of a leaf, after the dims in `gone` have been reduced to size 1."""

    leaf: str
    dims: tuple[int, ...]
    gone: tuple[int, ...] = ()


@dataclass(frozen=True)
class OptimizerFacts:
    """Collectives of the optimizer.
    sums: (label, sums computed together); one all-reduce for each set of mesh axes. matrices:
      leaves whose unsplit matrices are needed, with the number of their stacking dims.
    """

    sums: tuple[tuple[str, tuple[LeafSumFacts, ...]], ...] = ()
    matrices: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """A pipeline schedule's tables in numbers, and the work of a stage in a tick.

    axis: the mesh axis of the stages.
    forward, backward, weight: ticks in which any stage does that work; with weight 0, B computes
      the weights' gradients too.
    sent_on, sent_back: ticks that end by handing on activations, and gradients: those with F, with
      B, except in loops in which no stage receives any.
    chunks: of a stage. depth: turns of the stack in a chunk, padding included.
    keeps_residuals: F keeps what B needs; otherwise B runs the stage forward again.
    late_head: the head runs in ticks of B.
    ends_alone: the last tick is a loop of one turn, which a compiler does not treat as a loop.
    tallied: numbers counted by the routers of the stack.
    """

    axis: str
    forward: int
    backward: int
    weight: int
    sent_on: int
    sent_back: int
    chunks: int
    depth: int
    keeps_residuals: bool
    late_head: bool
    ends_alone: bool = False
    tallied: int = 0


@dataclass(frozen=True)
class FlopFacts:
    """Sizes from which matmul FLOPs are predicted.
    rows, seq: sizes of a microbatch on all devices together. needed: matmul FLOPs of a step,
      forward and backward, without recomputation. narrow: True if layers multiply in 8 bits.
    """

    rows: int
    seq: int
    needed: int
    narrow: bool = False


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The explicit step of a model that has a description.

    model: the description. loop: how its layers run.
    sizes: mesh axes of size > 1, in mesh order. roles: these axes by what they split.
    tokens: of a microbatch on one device, before `tensor` splits them. chunks: number of chunks in
      which the loss takes them.
    leaves: parameters by path. compute, reduce: NumPy's names of dtypes.
    sharded: gradients are scattered in each microbatch, not once a step.
    scaling: "current" or "delayed" if layers multiply in 8 bits, else None.
    pipeline: None without one.
    """

    sizes: Mapping[str, int]
    roles: Roles
    tokens: int
    chunks: int
    microbatches: int
    leaves: Mapping[str, LeafFacts]
    model: ModelDescription
    loop: LoopFacts
    compute: str
    reduce: str
    sharded: bool
    sums: SumFacts
    optimizer: OptimizerFacts
    algorithms: Algorithms
    scaling: str | None = None
    pipeline: PipelineFacts | None = None

    @property
    def sequence(self) -> SequenceFacts | None:
        """Facts of rows that are split over devices; None if rows are not split."""
        return self.algorithms.context

    @property
    def narrow(self) -> bool:
        """True if layers multiply in 8 bits."""
        return self.scaling is not None

    def expert_chunks(self, routing_group: int | None) -> int:
        """Returns the number of chunks that a mixture with that field computes one by one."""
        return chunk_count(self.tokens, self.loop.expert_chunk, routing_group)

    def named(self, *prefixes: str) -> set[str]:
        """Returns the leaves that match a prefix (`models.description.named_by`)."""
        exact, beginnings = {*prefixes}, tuple(name for name in prefixes if name.endswith("."))
        below = {k for k in self.leaves if k.startswith(beginnings)} if beginnings else set()
        return below | (exact & self.leaves.keys())

    def trains(self, *prefixes: str) -> bool:
        """Returns True if any leaf that matches a prefix is trained."""
        return any(self.leaves[name].trained for name in self.named(*prefixes))
