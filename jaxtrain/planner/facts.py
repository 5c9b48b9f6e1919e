"""What a prediction of a step may know: sizes, splits and policies, as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxtrain.models.description import ModelDescription, named_by

Dims = tuple[tuple[str, ...], ...]
"""For each dim of a tensor the mesh axes it is split over, major first."""


@dataclass(frozen=True)
class LeafFacts:
    """A parameter: its whole shape, NumPy's name of its dtype, and its splits at rest, in the
    optimizer and in use. `stacked`: how many dims count layers, chunks or experts; what has fewer
    than two others is used in its own dtype. One that is not `trained` has no gradient."""

    shape: tuple[int, ...]
    dtype: str
    params: Dims
    optimizer: Dims
    in_use: Dims
    stacked: int
    trained: bool = True


@dataclass(frozen=True)
class LoopFacts:
    """How the loop over layers runs: `nn.stack.LayerLoop`'s fields, and `Execution`'s
    `expert_chunk`. keeps_last: with prefetch, the last layer's weights for the backward pass."""

    unroll: bool
    remat: str
    prefetch: bool
    reshard: bool
    keeps_last: bool = False
    expert_chunk: int | None = None

    def fetched_again(self, layers: int) -> int:
        """How often the backward pass of a stack of `layers` gathers a layer's weights. A
        prefetching loop does it once more than others: its last turn fetches for a turn that does
        not come. (A loop of one turn is no loop to a compiler, which then drops what is not
        used.)"""
        if not self.reshard:
            return 0
        ahead = self.prefetch and not self.unroll
        return layers + (ahead and layers > 2) - (ahead and self.keeps_last)


@dataclass(frozen=True)
class SumFacts:
    """How gradients are summed over the mesh axes on which a leaf is whole.

    slow: the algorithm, over all those axes together; or, where `fast` names one too, over the
      first of them in a hierarchical sum whose other levels are `fast`'s. rounded: in bfloat16, by
      an all-to-all of the terms and an all-gather of the sums. small_leaf: elements up
      to which leaves are summed in one bucket. by_layer: stacked leaves in the backward pass.
    apart: leaves that a compressed reducer takes, none of which is in a bucket. encoded: the bytes
      of a tile's code, of each that is sent so; factors: the elements of both factors of each that
      is summed by PowerSGD. The others of `apart` are summed by `slow`.
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
    """How rows are cut over devices and seen whole: `context.methods` in numbers.

    axes: that cut them. local: tokens of a row on a device. group: devices that trade tokens for
    heads, 1 for none; groups: of these, in a ring where there are several. zigzag: the order of
    tokens (`context.order`). gathered: keys are gathered, and do not travel.
    """

    axes: tuple[str, ...]
    local: int
    groups: int
    group: int
    zigzag: bool
    gathered: bool


class Algorithms(NamedTuple):
    """Named as in `collectives.cost.steps.SCHEDULES`: of `Collectives`' fields, weights' gradients
    by that of `fsdp` where they have none of their own. tiled: gradients of the stack's products
    are scattered while they are made. experts: of rows to the devices of their experts, "ragged"
    where no more are sent than there are. context: how rows are seen whole; None where they are."""

    fsdp: str
    tensor: str
    weight_gradients: str
    tiled: bool
    experts: str
    context: SequenceFacts | None = None


class LeafSumFacts(NamedTuple):
    """A sum over dims of a leaf, in which those `gone` have size 1 already."""

    leaf: str
    dims: tuple[int, ...]
    gone: tuple[int, ...] = ()


@dataclass(frozen=True)
class OptimizerFacts:
    """sums: (why, those made together), by one all-reduce for each set of mesh axes. matrices:
    leaves whose matrices are needed whole, with the number of their stacking dims."""

    sums: tuple[tuple[str, tuple[LeafSumFacts, ...]], ...] = ()
    matrices: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PipelineFacts:
    """A schedule's tables in numbers, and what a stage does in a tick.

    axis: the mesh axis of the stages. forward, backward, weight: ticks in which any stage does that
      work; weight 0: B makes the weights' gradients too. sent_on, sent_back: ticks at whose end
      activations, and gradients, are handed on: those with F, with B, but for loops in which no
      stage receives any.
    chunks: of a stage; depth: the stack's turns in each, padding included. kept: F keeps what B
      needs, which else runs the stage forward again. late_head: the head runs in ticks of B.
      ends_alone: the last tick is a loop of its own, which a compiler takes for none. tallied:
      numbers that are counted of the routers of the stack.
    """

    axis: str
    forward: int
    backward: int
    weight: int
    sent_on: int
    sent_back: int
    chunks: int
    depth: int
    kept: bool
    late_head: bool
    ends_alone: bool = False
    tallied: int = 0


@dataclass(frozen=True)
class FlopFacts:
    """rows, seq: of a microbatch, on all devices together. needed: matmul FLOPs of a step, forward
    and backward, with nothing made twice. narrow: as of `StepFacts`."""

    rows: int
    seq: int
    needed: int
    narrow: bool = False


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """The explicit step of a model that describes itself.

    model: what it says. loop: how its layers run.
    sizes: mesh axes of size > 1, in mesh order. tensor: those that split heads, hidden units and
      vocabulary. tokens: of a microbatch on one device, before `tensor` splits them. chunks: that
      the loss takes them in. leaves: parameters by path.
    compute, reduce: NumPy's names of dtypes. sharded: gradients are scattered each microbatch, not
      once a step. scaling: "current" or "delayed" of layers that multiply in 8 bits, else None.
      pipeline: None without one; then all microbatches take the same way.
    by: algorithms.
    """

    sizes: Mapping[str, int]
    tensor: tuple[str, ...]
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
    by: Algorithms
    scaling: str | None = None
    pipeline: PipelineFacts | None = None

    @property
    def sequence(self) -> SequenceFacts | None:
        """How rows are seen whole; None where they are."""
        return self.by.context

    @property
    def narrow(self) -> bool:
        """Whether layers multiply in 8 bits."""
        return self.scaling is not None

    def trains(self, *prefixes: str) -> bool:
        """Whether any leaf is trained that these name (`models.description.named_by`)."""
        return any(leaf.trained and named_by(k, prefixes) for k, leaf in self.leaves.items())
