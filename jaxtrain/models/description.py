"""A model in values: all that other rooms know of one.

A block is a chain of operations on the residual stream [tokens, embed], in the order in which they
run. The planner reads from it what a step sends and computes, a split backward pass what can wait,
LoRA the matrices, and MFU the FLOPs. A test compares a description with the model's compiled
program (`jaxtrain compile`, the contract).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, replace

from jaxtrain.operations.block import (
    Block,
    chain,
    chain_with_ends,
    deferred_matrices,
    leaf_names,
    mixtures,
    operations,
)
from jaxtrain.operations.experts import ExpertCall
from jaxtrain.operations.flows import members_trained
from jaxtrain.operations.head import Head
from jaxtrain.operations.operation import Operation
from jaxtrain.operations.recompute import computed_from
from jaxtrain.telemetry.flops import AttentionFlops, Matmul, ModelFlops, forward_flops

STACK = "period."
"""Prefix of the names of leaves that are stacked over layers: those of the module's `period`."""
ADAPTER_A, ADAPTER_B = "_lora_a", "_lora_b"
"""Suffixes of the names of an adapter's matrices A and B, after their weight's name."""


ABILITIES = frozenset({"explicit", "pipeline", "context", "adapters", "generation", "objective"})
PAIRS = {"segments": (None,), "reference": ("seq",)}
"""Fields of a batch that a loss of pairs also reads, with the logical axes of a row."""
OF_PAIRS = ("reward_accuracy", "reward_margin", "reward_chosen", "reward_rejected")
"""Names of the sums beside a loss of pairs."""


def named_by(leaf: str, names: Iterable[str]) -> bool:
    """True if a leaf is one of `names`, or below one of them that ends with a dot."""
    return any(leaf == name or (name.endswith(".") and leaf.startswith(name)) for name in names)


@dataclass(frozen=True)
class Member:
    """A member of a residual stream of several arrays, [tokens, width], with an element for each
    token of a row.

    width: of the array. lookups: the tables whose vectors are added up in it. leaves: False if
    nothing behind the stack reads it: a pipeline then does not send it there."""

    width: int
    lookups: tuple[str, ...] = ()
    leaves: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Description of a model.

    embed: width of the residual stream, or of the member of it that the head reads. stream: members
    of a residual stream of several arrays, by the names that they have in the dict of it; {} for
    one array. Blocks then consist of `Update`s. period: the blocks of a stack, in which they repeat
    `periods` times; their leaves are `period.0.<leaf in the block>` and so on, stacked on dim 0.
    prefix, suffix: blocks before and after the stack, by the path that begins their leaves' names.
    head: how it ends. lookups: tables that are split over the vocabulary, read by
    `Communicator.embed`, each once, and added up. tables: all leaves that are gathered each by
    itself, the head and the lookups among them. entry: what is done to what was looked up before
    the first block, such as a `Bias` of positions, or a norm; leaves that are neither there nor
    looked up, nor in a block before the stack or in it, are read behind it.
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
    `empty_cache`; with objective, for which its `leave` returns the sums of its `objective`.
    """

    embed: int
    period: tuple[Block, ...]
    periods: int
    head: Head
    fields: Mapping[str, tuple[str | None, ...]]
    stream: Mapping[str, Member] = field(default_factory=dict)
    prefix: Mapping[str, Block] = field(default_factory=dict)
    suffix: Mapping[str, Block] = field(default_factory=dict)
    lookups: tuple[str, ...] = ("embedding",)
    tables: tuple[str, ...] = ()
    entry: tuple[Operation, ...] = ()
    positions: int | None = None
    switches: tuple[int, ...] = ()
    weights: str = "weights"
    sums: tuple[str, ...] = ()
    can: frozenset[str] = frozenset({"explicit", "pipeline", "adapters"})

    def with_preferences(self) -> ModelDescription:
        """Returns the description of this model with a loss of pairs (`losses.preferences`)."""
        head, fields = replace(self.head, of_pairs=True), {**self.fields, **PAIRS}
        return replace(self, head=head, fields=fields, sums=(*self.sums, *OF_PAIRS))

    @property
    def members(self) -> dict[str, Member]:
        """Arrays of the residual stream by name. A stream of one array has one, named ""."""
        return dict(self.stream) or {"": Member(self.embed, self.lookups)}

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
        return _deferred(self.stacked)

    @property
    def products(self) -> list[str]:
        """`stacked_products`, and those of the blocks outside the stack."""
        return _deferred(self.blocks)

    @property
    def expert_matrices(self) -> dict[str, int]:
        """Leaves of experts' matrices, with their numbers of experts."""
        return {
            path + weight.leaf: call.experts
            for path, block in self.blocks.items()
            for call in mixtures(block)
            for weight in call.weights
        }

    @property
    def narrowed(self) -> dict[str, int]:
        """Leaves that are in 8 bits if products are, with their numbers of scales."""
        return {
            path + leaf: scales
            for path, block in self.blocks.items()
            for operation in operations(block)
            for leaf, scales in operation.narrowed.items()
        }

    @property
    def blocks(self) -> dict[str, Block]:
        """Blocks by their paths, those of the period once."""
        return {**self.prefix, **self.stacked, **self.suffix}

    def layers_at(self, path: str) -> range:
        """Numbers, in natural order, of the layers whose leaves begin with `path`."""
        first, n = len(self.prefix), len(self.period)
        if path in self.stacked:
            return range(first + [*self.stacked].index(path), first + n * self.periods, n)
        outside = [*self.prefix, *self.suffix]
        number = outside.index(path)
        number += 0 if number < first else n * self.periods
        return range(number, number + 1)

    @property
    def expert_calls(self) -> list[ExpertCall]:
        """Mixtures of experts, those of the period once."""
        return [call for block in self.blocks.values() for call in mixtures(block)]

    @property
    def balances_microbatches(self) -> bool:
        """True if the gradients depend on how a batch is cut into microbatches."""
        return any(call.sums_loads for call in self.expert_calls)

    @property
    def layers(self) -> list[Block]:
        """Every layer's block, in natural order."""
        return [*self.prefix.values(), *(self.period * self.periods), *self.suffix.values()]

    def enters(self, leaf: str) -> bool:
        """True if a leaf is read before the stack."""
        return named_by(leaf, (*self.entering_alone, *self.prefix))

    @property
    def entering_alone(self) -> tuple[str, ...]:
        """Leaves that are read before the stack, except those of blocks."""
        return (*self.lookups, *leaf_names(self.entry))

    @property
    def tied(self) -> tuple[str, ...]:
        """Leaves that are read both before and after the stack."""
        return (self.head.leaf,) if self.enters(self.head.leaf) else ()

    @property
    def leaves_unread(self) -> bool:
        """True if the stack's last layer computes values that nothing reads behind it."""
        nodes, ends = chain_with_ends(self.period)
        read = computed_from(nodes, [n for k, n in ends.members.items() if self.stream[k].leaves])
        return bool(self.stream) and any(n.inputs and i not in read for i, n in enumerate(nodes))

    def all_members_have_gradients(self, trained: Set[str]) -> bool:
        """Returns True if all members of the stream have gradients before the stack, or none has,
        and all have them behind its first turn. trained: names of leaves."""
        paths = ["", *self.prefix]

        def trains(block: int, name: str) -> bool:
            names = [paths[block] + name + end for end in ("", ADAPTER_A, ADAPTER_B)]
            return any(named_by(leaf, names) for leaf in trained)

        looked_up = {name for name, member in self.stream.items() if trained & {*member.lookups}}
        entering = members_trained((self.entry, *self.prefix.values()), trains, looked_up)
        paths = [*self.stacked]
        leaving = members_trained(self.period, trains, entering)
        return len(entering) in (0, len(self.stream)) and len(leaving) == len(self.stream)

    def flops(
        self, *, seq: int, sequences: int, documents: Mapping[int, float] | None = None
    ) -> ModelFlops:
        """Matmul FLOPs of a forward pass over `sequences` sequences. Padded rows of the vocabulary
        and look-ups are not counted; of experts only those of a token are. documents: as for
        `forward_flops`."""
        matmuls = [Matmul(self.head.leaf, self.embed, self.head.vocab)]
        calls: Counter[AttentionFlops] = Counter()
        token_flops = 0
        for block, count in self._counted:
            for node in chain((block,)):
                matmuls += [Matmul(w.leaf, w.rows, w.columns, count * n) for w, n in node.products]
                token_flops += count * node.token_flops
                if node.scores is not None:
                    calls[node.scores] += count * node.scores.count
        attention = [replace(call, count=count) for call, count in calls.items()]
        return forward_flops(
            matmuls,
            attention,
            token_flops=token_flops,
            seq=seq,
            sequences=sequences,
            documents=documents,
        )

    @property
    def _counted(self) -> list[tuple[Block, int]]:
        """Blocks, with the number of layers of each."""
        outside = [(block, 1) for block in (*self.prefix.values(), *self.suffix.values())]
        return [*outside, *((block, self.periods) for block in self.period)]


def _deferred(blocks: Mapping[str, Block]) -> list[str]:
    return [
        path + weight.leaf for path, block in blocks.items() for weight in deferred_matrices(block)
    ]
