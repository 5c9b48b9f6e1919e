"""A model in values: all that the rest of the house knows of one.

A block is a chain of operations on the residual stream [tokens, embed], in the order in which they
run. From it the planner reads what a step sends and computes, a pipeline's split backward pass
what can wait, LoRA which matrices there are, and MFU its FLOPs. Whether a description is true of a
model is tested by its compiled program (`jaxtrain compile`, the contract).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from jaxtrain.telemetry.flops import Attention, Matmul, ModelFlops, forward_flops

if TYPE_CHECKING:
    from jaxtrain.moe.replay import Replay

STACK = "period."
"""What begins the names of leaves that are stacked over layers: those of the module's `period`."""
ADAPTER_A, ADAPTER_B = "_lora_a", "_lora_b"
"""What ends the names of an adapter's matrices, A and B, behind their weight's."""


@dataclass(frozen=True)
class Weight:
    """A matrix of a block. leaf: its name in the block; rows, columns: its two dims."""

    leaf: str
    rows: int
    columns: int

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class ColumnParallel:
    """x @ w for weights that tensor parallelism splits by column, by one `Communicator.column`:
    tokens are gathered before it (Shoeybi et al. 2019; Korthikanti et al. 2022). weights: those
    that one gather serves."""

    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class RowParallel:
    """x @ w for a weight that is split by row, by `Communicator.row`: the products are summed and
    their tokens scattered after it. weight: of the product."""

    weight: Weight

    @property
    def weights(self) -> tuple[Weight, ...]:
        return (self.weight,)


@dataclass(frozen=True)
class ReplicatedProduct:
    """x @ w for weights that every device of `tensor` has whole, by `Communicator.multiply`: each
    multiplies its own share of the tokens, and nothing is sent. weights: of one input."""

    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class TokenGather:
    """What the heads of every device read of all tokens, by `Communicator.all_tokens`. width: its
    numbers of a token."""

    width: int


@dataclass(frozen=True)
class AttentionCall:
    """Scores and values of all heads, by `Communicator.attend`. heads: of queries; kv_heads: of
    keys and values; head_dim: of each as the kernel is given them; causal: a query sees no later
    key. window, softcap: as `AttentionConfig` has them. needed: head_dim of queries and keys, and
    that of values, without what pads the shorter to the longer; None where neither is padded."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    needed: tuple[int, int] | None = None

    @property
    def flops(self) -> Attention:
        """One layer's, for `telemetry.flops`."""
        size, value = self.needed or (self.head_dim, None)
        return Attention(self.heads, size, self.window, causal=self.causal, value_dim=value)


@dataclass(frozen=True)
class ExpertCall:
    """A mixture of experts, by `Communicator.experts`. router: its matrix; weights: those of one
    expert; experts: how many there are; per_token: through how many of them a token goes; shared:
    matrices that every token meets beside them. learns: whether the router has a gradient from the
    loss. rows_of_group: tokens that an expert takes of each `routing_group` of them, None for all.

    tallied: a step counts its choices; sums_loads: and adds them up over devices in each pass, for
    an auxiliary loss; bias_rate: by how much the router's bias moves in a step; replay: of routing
    that is kept.
    """

    router: Weight
    weights: tuple[Weight, ...]
    experts: int
    per_token: int
    shared: tuple[Weight, ...] = ()
    learns: bool = True
    tallied: bool = False
    sums_loads: bool = False
    bias_rate: float = 0.0
    routing_group: int | None = None
    rows_of_group: int | None = None
    replay: Replay | None = None

    @property
    def leaves(self) -> tuple[str, ...]:
        return (self.router.leaf, *(weight.leaf for weight in (*self.weights, *self.shared)))


@dataclass(frozen=True)
class Elementwise:
    """A function of each token by itself whose derivative needs its input: a norm, an activation.
    leaves: beginnings of the names of the parameters it reads."""

    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormAcrossHeads:
    """Norms of what tensor parallelism has split by heads, over all of them: of each token `sums`
    numbers are summed over devices, by one `Communicator.sum_over_heads`. leaves: as of
    `Elementwise`."""

    leaves: tuple[str, ...]
    sums: int


@dataclass(frozen=True)
class Bias:
    """A parameter that is added: its derivative needs nothing. leaves: as of `Elementwise`."""

    leaves: tuple[str, ...]


@dataclass(frozen=True)
class Branches:
    """Operations side by side on one input; what comes after them reads what all of them end with.
    branches: each a chain."""

    branches: tuple[tuple[Operation, ...], ...]


ABILITIES = frozenset({"explicit", "pipeline", "context", "adapters", "generation"})
Product = ColumnParallel | RowParallel | ReplicatedProduct
"""What multiplies tokens by matrices that all of them meet."""
Operation = (
    Product
    | TokenGather
    | AttentionCall
    | ExpertCall
    | Elementwise
    | NormAcrossHeads
    | Bias
    | Branches
)


@dataclass(frozen=True)
class Residual:
    """x + branch(x). branch: what is done to x before it is added."""

    branch: tuple[Operation, ...]


Block = tuple[Operation | Residual, ...]


def named_by(leaf: str, names: Iterable[str]) -> bool:
    """Whether a leaf is one of `names`, or below one of them that ends with a dot."""
    return any(leaf == name or (name.endswith(".") and leaf.startswith(name)) for name in names)


def operations(block: Block) -> Iterator[Operation]:
    """Those of a block, in their order; of branches those in them."""
    for step in block:
        if isinstance(step, Residual):
            yield from operations(step.branch)
        elif isinstance(step, Branches):
            for branch in step.branches:
                yield from operations(branch)
        else:
            yield step


def matrices(operation: Operation) -> tuple[Weight, ...]:
    """All that an operation multiplies by; of experts the router, those of one and of the
    shared one."""
    if isinstance(operation, ExpertCall):
        return (operation.router, *operation.weights, *operation.shared)
    return operation.weights if isinstance(operation, Product) else ()


def products(block: Block) -> Iterator[Weight]:
    """The matrices that every token of a block meets by `column` or `row`: those that may be
    multiplied by in 8 bits, and whose gradients a schedule's W makes."""
    for each in operations(block):
        if isinstance(each, ColumnParallel | RowParallel):
            yield from each.weights


def adaptable(block: Block) -> Iterator[Weight]:
    """The matrices of a block that can have adapters: all but those with one column."""
    for each in operations(block):
        yield from (weight for weight in matrices(each) if weight.columns > 1)


@dataclass(frozen=True)
class Head:
    """Logits and loss over a vocabulary that is split, by `nn.loss.cross_entropy`. leaf: its table
    [padded, embed]; vocab: its real rows; padded: all of them; chunk_tokens: as `HeadConfig` has
    it."""

    leaf: str
    vocab: int
    padded: int
    chunk_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """What a model says of itself.

    embed: width of the residual stream. period: the blocks of a stack, in which they repeat
    `periods` times; their leaves are `period.0.<leaf in the block>` and so on, stacked on dim 0.
    before, after: blocks beside the stack, by the path that begins their leaves' names.
    head: how it ends. lookups: tables that are split over the vocabulary, read by
    `Communicator.embed`, each once, and added up. tables: all leaves that are gathered each by
    itself, the head and the lookups among them. entering: what else is read before the stack, by
    names, or beginnings of names that end with a dot; what is neither there nor in the stack is
    read behind it. entry: what is done to what was looked up before the first block, such as a
    norm.
    fields: what a batch must hold, with the logical axes of a row; the first has one element for
    each token of the residual stream, ("seq",). weights: the field that its losses are multiplied
    by, with which an evaluation drops rows that it has no use for; one called "weights" is made of
    ones where rows have none. positions: the longest sequence that there are positions
    for, None for any. switches: lengths beyond which a sequence's keys are others from its first
    token on, so that a cache is made anew there (`Rope.switch`).
    sums: names of what `loss` adds up beside the loss, weighted like it, such as "accuracy".
    can: of ABILITIES: run in explicit mode, on stages, with parts of a sequence, for which it asks
    `Communicator.positions` where tokens are and attends by a `SelfAttention` with the document
    starts of whole rows; with LoRA's adapters, and generate, for which it has `decode` and
    `empty_cache`.
    """

    embed: int
    period: tuple[Block, ...]
    periods: int
    head: Head
    fields: Mapping[str, tuple[str | None, ...]]
    before: Mapping[str, Block] = field(default_factory=dict)
    after: Mapping[str, Block] = field(default_factory=dict)
    lookups: tuple[str, ...] = ("embedding",)
    tables: tuple[str, ...] = ()
    entering: tuple[str, ...] = ()
    entry: tuple[Operation, ...] = ()
    positions: int | None = None
    switches: tuple[int, ...] = ()
    weights: str = "weights"
    sums: tuple[str, ...] = ()
    can: frozenset[str] = frozenset({"explicit", "pipeline", "adapters"})

    @property
    def tokens(self) -> str:
        """The field of a batch that has an element for each token."""
        return next(iter(self.fields))

    @property
    def stacked(self) -> dict[str, Block]:
        """The blocks of a period by their paths."""
        return {f"{STACK}{i}.": block for i, block in enumerate(self.period)}

    @property
    def stacked_products(self) -> list[str]:
        """The leaves of the stack that are multiplied by, by `column` or `row`."""
        every = ((path, weight) for path, b in self.stacked.items() for weight in products(b))
        return [path + weight.leaf for path, weight in every]

    @property
    def products(self) -> list[str]:
        """Those, and the leaves of the blocks beside the stack that are multiplied by so."""
        return [path + weight.leaf for path, b in self.blocks.items() for weight in products(b)]

    @property
    def expert_matrices(self) -> dict[str, int]:
        """The leaves of experts' matrices, and of how many experts each is."""
        return {
            path + weight.leaf: each.experts
            for path, block in self.blocks.items()
            for each in operations(block)
            if isinstance(each, ExpertCall)
            for weight in each.weights
        }

    @property
    def narrowed(self) -> dict[str, int]:
        """The leaves that are multiplied by in 8 bits where that is asked for, and how many scales
        each has."""
        return {**dict.fromkeys(self.products, 1), **self.expert_matrices}

    @property
    def blocks(self) -> dict[str, Block]:
        """All blocks by their paths, those of the period once."""
        return {**self.before, **self.stacked, **self.after}

    def layers_at(self, path: str) -> range:
        """The numbers, in natural order, of the layers whose leaves begin with `path`."""
        first, n = len(self.before), len(self.period)
        if path in self.stacked:
            return range(first + [*self.stacked].index(path), first + n * self.periods, n)
        outside = [*self.before, *self.after]
        at = outside.index(path)
        at += 0 if at < first else n * self.periods
        return range(at, at + 1)

    @property
    def expert_calls(self) -> list[ExpertCall]:
        """Mixtures of experts, those of the period once."""
        every = (each for block in self.blocks.values() for each in operations(block))
        return [each for each in every if isinstance(each, ExpertCall)]

    @property
    def balances_microbatches(self) -> bool:
        """Whether what is learned hangs on how a batch is cut into microbatches."""
        return any(call.sums_loads for call in self.expert_calls)

    @property
    def layers(self) -> list[Block]:
        """Every layer's block, in natural order."""
        return [*self.before.values(), *(self.period * self.periods), *self.after.values()]

    def enters(self, leaf: str) -> bool:
        """Whether a leaf is read before the stack."""
        return named_by(leaf, (*self.entering_alone, *self.before))

    @property
    def entering_alone(self) -> tuple[str, ...]:
        """What is read before the stack, without the blocks there."""
        return (*self.lookups, *self.entering)

    @property
    def tied(self) -> tuple[str, ...]:
        """Leaves that are read before the stack and behind it."""
        return (self.head.leaf,) if self.enters(self.head.leaf) else ()

    def flops(
        self, *, seq: int, sequences: int, documents: Mapping[int, float] | None = None
    ) -> ModelFlops:
        """Matmul FLOPs of a forward pass over `sequences` sequences; the padded rows of the
        vocabulary are not counted, nor is a look-up; of experts those that a token goes through.
        documents: as for `forward_flops`."""
        matmuls, calls = [Matmul(self.head.leaf, self.embed, self.head.vocab)], Counter()
        for block, count in self._counted:
            for each in operations(block):
                if isinstance(each, Product):
                    matmuls += [Matmul(w.leaf, w.rows, w.columns, count) for w in each.weights]
                elif isinstance(each, ExpertCall):
                    met = count * each.per_token
                    every = (each.router, *each.shared)
                    matmuls += [Matmul(w.leaf, w.rows, w.columns, count) for w in every]
                    matmuls += [Matmul(w.leaf, w.rows, w.columns, met) for w in each.weights]
                elif isinstance(each, AttentionCall):
                    calls[each.flops] += count
        attention = [replace(call, count=count) for call, count in calls.items()]
        return forward_flops(matmuls, attention, seq=seq, sequences=sequences, documents=documents)

    @property
    def _counted(self) -> list[tuple[Block, int]]:
        """Blocks, and how many layers are alike."""
        outside = [(block, 1) for block in (*self.before.values(), *self.after.values())]
        return [*outside, *((block, self.periods) for block in self.period)]
