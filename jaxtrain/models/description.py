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

from jaxtrain.telemetry.flops import Attention, Matmul, ModelFlops, forward_flops

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
class AttentionCall:
    """Scores and values of all heads, by `Communicator.attend`. heads: of queries; kv_heads: of
    keys and values; head_dim: of each; causal: a query sees no later key. window, softcap: as
    `AttentionConfig` has them."""

    heads: int
    kv_heads: int
    head_dim: int
    causal: bool = True
    window: int | None = None
    softcap: float | None = None

    @property
    def flops(self) -> Attention:
        """One layer's, for `telemetry.flops`."""
        return Attention(self.heads, self.head_dim, self.window, causal=self.causal)


@dataclass(frozen=True)
class ExpertCall:
    """A mixture of experts, by `Communicator.experts`. router: its matrix; weights: those of one
    expert; experts: how many there are; per_token: through how many of them a token goes."""

    router: Weight
    weights: tuple[Weight, ...]
    experts: int
    per_token: int

    @property
    def leaves(self) -> tuple[str, ...]:
        return (self.router.leaf, *(weight.leaf for weight in self.weights))


@dataclass(frozen=True)
class Elementwise:
    """A function of each token by itself whose derivative needs its input: a norm, an activation.
    leaves: beginnings of the names of the parameters it reads."""

    leaves: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bias:
    """A parameter that is added: its derivative needs nothing. leaves: as of `Elementwise`."""

    leaves: tuple[str, ...]


ABILITIES = frozenset({"explicit", "pipeline", "adapters", "generation"})
Operation = ColumnParallel | RowParallel | AttentionCall | ExpertCall | Elementwise | Bias


@dataclass(frozen=True)
class Residual:
    """x + branch(x). branch: what is done to x before it is added."""

    branch: tuple[Operation, ...]


Block = tuple[Operation | Residual, ...]


def named_by(leaf: str, names: Iterable[str]) -> bool:
    """Whether a leaf is one of `names`, or below one of them that ends with a dot."""
    return any(leaf == name or (name.endswith(".") and leaf.startswith(name)) for name in names)


def operations(block: Block) -> Iterator[Operation]:
    """Those of a block, in their order."""
    for step in block:
        yield from step.branch if isinstance(step, Residual) else (step,)


def matrices(operation: Operation) -> tuple[Weight, ...]:
    """All that an operation multiplies by; of experts the router and one expert's."""
    if isinstance(operation, ExpertCall):
        return (operation.router, *operation.weights)
    return operation.weights if isinstance(operation, ColumnParallel | RowParallel) else ()


def products(block: Block) -> Iterator[Weight]:
    """The matrices that every token of a block meets by `column` or `row`: those that can have
    adapters, and whose gradients a schedule's W makes."""
    for each in operations(block):
        if isinstance(each, ColumnParallel | RowParallel):
            yield from each.weights


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
    for, None for any.
    sums: names of what `loss` adds up beside the loss, weighted like it, such as "accuracy".
    can: of ABILITIES: run in explicit mode, on stages, with LoRA's adapters, and generate, for
    which it has `decode` and `empty_cache`.
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
                if isinstance(each, ColumnParallel | RowParallel):
                    matmuls += [Matmul(w.leaf, w.rows, w.columns, count) for w in each.weights]
                elif isinstance(each, ExpertCall):
                    r, met = each.router, count * each.per_token
                    matmuls += [Matmul(r.leaf, r.rows, r.columns, count)]
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
