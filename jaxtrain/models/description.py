"""A model in values: all that other rooms know of one.

A block is a chain of operations on the residual stream [tokens, embed], in the order in which they
run. The planner reads from it what a step sends and computes, a split backward pass what can wait,
LoRA the matrices, and MFU the FLOPs. A test compares a description with the model's compiled
program (`jaxtrain compile`, the contract).
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
"""Prefix of the names of leaves that are stacked over layers: those of the module's `period`."""
ADAPTER_A, ADAPTER_B = "_lora_a", "_lora_b"
"""Suffixes of the names of an adapter's matrices A and B, after their weight's name."""


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
    tokens are gathered before it (Shoeybi et al. 2019; Korthikanti et al. 2022). weights: those of
    one gather."""

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
    """x @ w for weights that are replicated over `tensor`, by `Communicator.multiply`: each device
    multiplies its own share of the tokens, and nothing is sent. weights: of one input."""

    weights: tuple[Weight, ...]


@dataclass(frozen=True)
class TokenGather:
    """Values of all tokens that the heads of every device read, by `Communicator.all_tokens`.
    width: numbers of a token."""

    width: int


@dataclass(frozen=True)
class AttentionCall:
    """Scores and values of all heads, by `Communicator.attend`. heads: of queries. kv_heads: of
    keys and values. head_dim: that the kernel gets. causal: a query sees no later key. window: as
    in `AttentionConfig`. softcap: likewise. needed: head_dim of queries and keys, and of values,
    without padding of the shorter; None if neither is padded."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    needed: tuple[int, int] | None = None

    @property
    def flops(self) -> Attention:
        """FLOPs of one layer, for `telemetry.flops`."""
        size, value = self.needed or (self.head_dim, None)
        return Attention(self.heads, size, self.window, causal=self.causal, value_dim=value)


@dataclass(frozen=True)
class ExpertCall:
    """A mixture of experts, by `Communicator.experts`. router: its matrix. weights: those of one
    expert. experts: their number. per_token: experts of a token. shared: matrices of the shared
    expert, for every token. learns: True if the router has a gradient from the loss. rows_of_group:
    tokens that an expert takes from each `routing_group` tokens, None for all.

    tallied: a step counts its choices. sums_loads: each pass also sums them over devices, for an
    auxiliary loss. bias_rate: change of the router's bias in a step. replay: of recorded routing.
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
    leaves: prefixes of the names of its parameters."""

    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class NormAcrossHeads:
    """Norms over all heads, which tensor parallelism splits: `sums` numbers of each token are
    summed over devices, by one `Communicator.sum_over_heads`. leaves: as in `Elementwise`."""

    leaves: tuple[str, ...]
    sums: int


@dataclass(frozen=True)
class Bias:
    """A parameter that is added: its derivative needs no input. leaves: as in `Elementwise`."""

    leaves: tuple[str, ...]


@dataclass(frozen=True)
class Branches:
    """Operations side by side on one input; the operation after them reads the outputs of all.
    branches: each a chain."""

    branches: tuple[tuple[Operation, ...], ...]


ABILITIES = frozenset({"explicit", "pipeline", "context", "adapters", "generation"})
Product = ColumnParallel | RowParallel | ReplicatedProduct
"""Products of all tokens with the same matrices."""
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
    """x + branch(x). branch: operations on x before it is added."""

    branch: tuple[Operation, ...]


Block = tuple[Operation | Residual, ...]


def named_by(leaf: str, names: Iterable[str]) -> bool:
    """True if a leaf is one of `names`, or below one of them that ends with a dot."""
    return any(leaf == name or (name.endswith(".") and leaf.startswith(name)) for name in names)


def operations(block: Block) -> Iterator[Operation]:
    """Operations of a block, in their order, including those within branches."""
    for step in block:
        if isinstance(step, Residual):
            yield from operations(step.branch)
        elif isinstance(step, Branches):
            for branch in step.branches:
                yield from operations(branch)
        else:
            yield step


def matrices(operation: Operation) -> tuple[Weight, ...]:
    """Matrices that an operation multiplies by. For experts: the router, those of one expert and of
    the shared one."""
    if isinstance(operation, ExpertCall):
        return (operation.router, *operation.weights, *operation.shared)
    return operation.weights if isinstance(operation, Product) else ()


def products(block: Block) -> Iterator[Weight]:
    """Matrices that multiply every token of a block by `column` or `row`. They may be in 8 bits,
    and a schedule's W computes their gradients."""
    for operation in operations(block):
        if isinstance(operation, ColumnParallel | RowParallel):
            yield from operation.weights


def adaptable(block: Block) -> Iterator[Weight]:
    """Matrices of a block that can have adapters: all but those with one column."""
    for operation in operations(block):
        yield from (weight for weight in matrices(operation) if weight.columns > 1)


@dataclass(frozen=True)
class Head:
    """Logits and loss over a vocabulary that is split, by `nn.loss.cross_entropy`. leaf: its table
    [padded, embed]. vocab: real rows. padded: all rows. chunk_tokens: as in `HeadConfig`."""

    leaf: str
    vocab: int
    padded: int
    chunk_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Description of a model.

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
        """Field of a batch that has an element for each token."""
        return next(iter(self.fields))

    @property
    def stacked(self) -> dict[str, Block]:
        """Blocks of a period by their paths."""
        return {f"{STACK}{i}.": block for i, block in enumerate(self.period)}

    @property
    def stacked_products(self) -> list[str]:
        """Leaves of the stack that are multiplied by `column` or `row`."""
        every = ((path, weight) for path, b in self.stacked.items() for weight in products(b))
        return [path + weight.leaf for path, weight in every]

    @property
    def products(self) -> list[str]:
        """`stacked_products`, and those of the blocks outside the stack."""
        return [path + weight.leaf for path, b in self.blocks.items() for weight in products(b)]

    @property
    def expert_matrices(self) -> dict[str, int]:
        """Leaves of experts' matrices, with their numbers of experts."""
        return {
            path + weight.leaf: call.experts
            for path, block in self.blocks.items()
            for call in operations(block)
            if isinstance(call, ExpertCall)
            for weight in call.weights
        }

    @property
    def narrowed(self) -> dict[str, int]:
        """Leaves that are in 8 bits if products are, with their numbers of scales."""
        return {**dict.fromkeys(self.products, 1), **self.expert_matrices}

    @property
    def blocks(self) -> dict[str, Block]:
        """Blocks by their paths, those of the period once."""
        return {**self.before, **self.stacked, **self.after}

    def layers_at(self, path: str) -> range:
        """Numbers, in natural order, of the layers whose leaves begin with `path`."""
        first, n = len(self.before), len(self.period)
        if path in self.stacked:
            return range(first + [*self.stacked].index(path), first + n * self.periods, n)
        outside = [*self.before, *self.after]
        number = outside.index(path)
        number += 0 if number < first else n * self.periods
        return range(number, number + 1)

    @property
    def expert_calls(self) -> list[ExpertCall]:
        """Mixtures of experts, those of the period once."""
        calls = (call for block in self.blocks.values() for call in operations(block))
        return [call for call in calls if isinstance(call, ExpertCall)]

    @property
    def balances_microbatches(self) -> bool:
        """True if the gradients depend on how a batch is cut into microbatches."""
        return any(call.sums_loads for call in self.expert_calls)

    @property
    def layers(self) -> list[Block]:
        """Every layer's block, in natural order."""
        return [*self.before.values(), *(self.period * self.periods), *self.after.values()]

    def enters(self, leaf: str) -> bool:
        """True if a leaf is read before the stack."""
        return named_by(leaf, (*self.entering_alone, *self.before))

    @property
    def entering_alone(self) -> tuple[str, ...]:
        """Leaves that are read before the stack, except those of blocks."""
        return (*self.lookups, *self.entering)

    @property
    def tied(self) -> tuple[str, ...]:
        """Leaves that are read both before and after the stack."""
        return (self.head.leaf,) if self.enters(self.head.leaf) else ()

    def flops(
        self, *, seq: int, sequences: int, documents: Mapping[int, float] | None = None
    ) -> ModelFlops:
        """Matmul FLOPs of a forward pass over `sequences` sequences. Padded rows of the vocabulary
        and look-ups are not counted; of experts only those of a token are. documents: as for
        `forward_flops`."""
        matmuls, calls = [Matmul(self.head.leaf, self.embed, self.head.vocab)], Counter()
        for block, count in self._counted:
            for step in operations(block):
                if isinstance(step, Product):
                    matmuls += [Matmul(w.leaf, w.rows, w.columns, count) for w in step.weights]
                elif isinstance(step, ExpertCall):
                    routed = count * step.per_token
                    dense = (step.router, *step.shared)
                    matmuls += [Matmul(w.leaf, w.rows, w.columns, count) for w in dense]
                    matmuls += [Matmul(w.leaf, w.rows, w.columns, routed) for w in step.weights]
                elif isinstance(step, AttentionCall):
                    calls[step.flops] += count
        attention = [replace(call, count=count) for call, count in calls.items()]
        return forward_flops(matmuls, attention, seq=seq, sequences=sequences, documents=documents)

    @property
    def _counted(self) -> list[tuple[Block, int]]:
        """Blocks, with the number of layers of each."""
        outside = [(block, 1) for block in (*self.before.values(), *self.after.values())]
        return [*outside, *((block, self.periods) for block in self.period)]
