"""Which collectives of tokens a backward pass needs: all of them, unless leaves are frozen.

Demand runs downwards. A block is norm, column product, attention, row product, norm, column
product, activation, row product, each product's tokens gathered before and scattered after it.
Gradients flow down to the lowest leaf that is trained, and no further; on their way they read
values that the remat policy has kept, or that are made again from those below them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxtrain.planner.facts import StepFacts

ADAPTED = ("", "_lora_a", "_lora_b")
"""What ends the names of leaves whose gradients need that of a weight: its own and its adapter's.
"""
KEPT = {
    "none": {"g1", "q", "a", "r1", "x1", "g2", "u", "h", "r2", "x2"},
    "full": set(),
    "attention": {"a"},
    "dots": {"q", "r1", "u", "r2"},
    "dots_and_attention": {"q", "r1", "u", "r2", "a"},
}
"""The values of a block that each remat policy keeps: g inputs of column products, q and u their
outputs, a attention's, h the activation's, r outputs of row products, x the residual stream."""
MADE_OF = {
    "g1": ("x0",),
    "q": ("g1",),
    "a": ("q",),
    "r1": ("a",),
    "x1": ("x0", "r1"),
    "g2": ("x1",),
    "u": ("g2",),
    "h": ("u",),
    "r2": ("h",),
    "x2": ("x1", "r2"),
}
PRODUCTS_OF = {"q", "r1", "u", "r2"}
QKV = ("attention.query", "attention.key", "attention.value")
AFTER_QKV = (*(f"{name}_bias" for name in QKV), "attention.query_norm.", "attention.key_norm.")
AFTER_UP = ("mlp.gate_bias", "mlp.up_bias")


class Work(NamedTuple):
    """Of one turn of the remat policy's body. rows, columns: row products' output gradients are
    gathered, column products' input gradients scattered, so often; rows_again, columns_again: what
    the forward pass did, repeated. weights: whether any matrix is read. made: values made again,
    each with the number of its block."""

    rows: int = 0
    columns: int = 0
    rows_again: int = 0
    columns_again: int = 0
    weights: bool = False
    made: frozenset[tuple[int, str]] = frozenset()


def works(facts: StepFacts) -> dict[str, list[tuple[Work, int]]]:
    """By path prefix of each block outside the stack, and "period." of the stack: the work of its
    turns and how many are alike."""
    layers = facts.layers
    below = facts.trains("embedding", "positions")
    found: dict[str, list[tuple[Work, int]]] = {}
    before = [name for name in layers.outside if name.startswith("prefix.")]
    after = [name for name in layers.outside if name not in before]
    for name in before:
        found[name] = [(body_work(facts, [name], below=below), 1)]
        below = below or facts.trains(name)
    found["period."] = stack_works(facts, layers.periods, below=below)
    below = below or facts.trains("period.")
    for name in after:
        found[name] = [(body_work(facts, [name], below=below), 1)]
        below = below or facts.trains(name)
    return found


def stack_works(facts: StepFacts, turns: int, *, below: bool) -> list[tuple[Work, int]]:
    """Of a stack, or a chunk of it. Turns of a loop are alike; written out, or of one turn, the
    first may need less."""
    layers = facts.layers
    if not below and not facts.trains("period."):
        return [(Work(), turns)]
    above = body_work(facts, layers.in_period, below=True)
    if not layers.unroll and turns - layers.prefetch > 1:
        return [(above, turns)]
    return [(body_work(facts, layers.in_period, below=below), 1), (above, turns - 1)]


def fetched_again(facts: StepFacts, found: list[tuple[Work, int]]) -> int:
    """How often the backward pass of a stack gathers a layer's weights."""
    turns = sum(n for _, n in found)
    without = sum(n for work, n in found if not work.weights)
    fetched = facts.layers.fetched_again(turns)
    return 0 if without == turns else max(fetched - without, 0)


def body_work(facts: StepFacts, blocks: Sequence[str], *, below: bool) -> Work:
    """The backward pass of the blocks at these paths. below: the gradient of their input is
    needed."""
    body = _Body(facts)
    for at, block in enumerate(blocks):
        below = body.descend(block, at, below)
    again = body.made_again()
    return Work(
        body.rows,
        body.columns,
        sum(value in ("x1", "x2") for _, value in again),
        sum(value in ("g1", "g2") for _, value in again),
        body.weights or any(value in PRODUCTS_OF for _, value in again),
        frozenset(again),
    )


class _Body:
    """What the backward pass of a body reads, block by block."""

    def __init__(self, facts: StepFacts) -> None:
        self.facts, self.rows, self.columns, self.weights = facts, 0, 0, False
        self.read: set[tuple[int, str]] = set()

    def descend(self, block: str, at: int, reached: bool) -> bool:
        """One block; `reached`: gradients go on below it, and so they do below what is behind."""
        mixed = block + "mlp." in self.facts.layers.experts
        reached |= self.facts.trains(block + "attention_norm.")
        self._through(at, reached, "x0", "columns")
        reached |= self._weights(at, block, QKV, "g1")
        reached |= self._trains(block, AFTER_QKV)
        self._through(at, reached, "q", None)
        reached |= self._weights(at, block, ("attention.out",), "a")
        self.rows += reached
        reached |= self._trains(block, ("attention.out_bias", "mlp_norm."))
        self._through(at, reached, "x1", "columns")
        if mixed:
            reached |= self._trains(block, ("mlp.",))
            self._through(at, reached, "g2", None)
        else:
            reached |= self._weights(at, block, ("mlp.gate", "mlp.up"), "g2")
            reached |= self._trains(block, AFTER_UP)
            self._through(at, reached, "u", None)
            reached |= self._weights(at, block, ("mlp.down",), "h")
        self.rows += reached
        return reached | self._trains(block, ("mlp.down_bias",))

    def made_again(self) -> set[tuple[int, str]]:
        """What is read and not kept, and what that is made of."""
        kept, found, open_ = KEPT[self.facts.layers.remat], set(), list(self.read)
        while open_:
            at, value = open_.pop()
            if value == "x0":
                at, value = at - 1, "x2"
            if at < 0 or value in kept or (at, value) in found:
                continue
            found.add((at, value))
            open_ += [(at, part) for part in MADE_OF[value]]
        return found

    def _through(self, at: int, reached: bool, value: str, count: str | None) -> None:
        """A gradient that goes below `value` reads it, and the matrix above it."""
        if reached:
            self.read.add((at, value))
            self.weights = True
            if count is not None:
                self.columns += 1

    def _weights(self, at: int, block: str, names: tuple[str, ...], read: str) -> bool:
        """Whether any of a product's weights is trained; then its input is read."""
        leaves = self.facts.leaves
        found = [leaves.get(block + name + end) for name in names for end in ADAPTED]
        trained = any(leaf is not None and leaf.trained for leaf in found)
        if trained:
            self.read.add((at, read))
            adapter = (leaves.get(block + name + ADAPTED[1]) for name in names)
            self.weights |= any(leaf is not None and leaf.trained for leaf in adapter)
        return trained

    def _trains(self, block: str, names: Iterable[str]) -> bool:
        return self.facts.trains(*(block + name for name in names))
