"""Nodes of operations: their numbers, in blocks of every form."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from jaxtrain import operations as of
from jaxtrain.operations.block import chain, entry_members, matrices, operations
from jaxtrain.operations.check import wrong_nodes
from jaxtrain.operations.recompute import members_read

EMBED = 8


def weight(leaf: str, rows: int = EMBED, columns: int = EMBED) -> of.Weight:
    return of.Weight(leaf, rows, columns)


PARTS: dict[str, of.Operation] = {
    "column": of.ColumnParallel((weight("query"), weight("key"))),
    "row": of.RowParallel(weight("out")),
    "replicated": of.ReplicatedProduct((weight("down"),)),
    "gather": of.TokenGather(4),
    "attention": of.AttentionCall(4, 2, 2),
    "experts": of.ExpertCall(weight("router", columns=4), (weight("up"), weight("wide")), 4, 2),
    "norm": of.Elementwise(("norm.",)),
    "across": of.NormAcrossHeads(("wide_norm.",), sums=2),
    "bias": of.Bias(("bias",)),
}
ALL = tuple(PARTS.values())
FORMS: dict[str, of.Block] = {
    **{name: (part,) for name, part in PARTS.items()},
    "one after another": ALL,
    "residual": (of.Residual(ALL), of.Residual(ALL[::-1])),
    "branches": (of.Branches((ALL[::-1], ALL, ())), *ALL),
    "nested": (of.Residual((of.Branches(((of.Residual(ALL),), ALL)),)),),
    "nothing": (of.Residual(()),),
}


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_value_is_of_earlier_ones_and_its_derivatives_read_no_later(
    form: str, narrow: bool
) -> None:
    nodes = chain((FORMS[form],) * 2, narrow)
    assert nodes[0] == of.Node()
    for number, node in enumerate(nodes[1:], start=1):
        assert node.inputs and max(node.inputs) < number
        assert {*node.input_reads, *node.leaf_reads} <= {*range(number + 1)}
    used = {source for node in nodes for source in node.inputs}
    assert used == {*range(len(nodes) - 1)}, "all but the last value are read"
    assert [node.block for node in nodes[1:]] == sorted(node.block for node in nodes[1:])


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("name", PARTS)
def test_nodes_are_the_same_wherever_they_stand(name: str, narrow: bool) -> None:
    """An operation names the nodes it reads from its own numbers: those of an operation that stands
    elsewhere differ by the distance, and by what it enters from."""

    def moved(numbers: tuple[int, ...], entry: int, number: int) -> list[int | None]:
        return [None if n == entry else n - number for n in numbers]

    here, there = (PARTS[name].nodes(*at, narrow=narrow) for at in ((0, 1), (3, 17)))
    assert len(here) == len(there)
    for own, other in zip(here, there, strict=True):
        for field in ("inputs", "input_reads", "leaf_reads"):
            assert moved(getattr(own, field), 0, 1) == moved(getattr(other, field), 3, 17), field


READS: dict[str, list[tuple[set[int], set[int], set[int]]]] = {
    "column": [({0}, set(), set()), ({1}, set(), {1})],
    "row": [({0}, set(), {0}), ({1}, set(), set())],
    "replicated": [({0}, set(), {0})],
    "gather": [({0}, set(), set())],
    "attention": [({0}, set(), set()), ({1}, {1, 2}, set()), ({2}, set(), set())],
    "experts": [
        ({0}, set(), set()),
        ({1}, set(), set()),
        ({2, 1}, {1, 2, 3}, {1, 2, 3}),
        ({3}, set(), set()),
    ],
    "norm": [({0}, {0}, {0})],
    "across": [({0}, {0}, set()), ({1, 0}, {1, 0}, {1, 0})],
    "bias": [({0}, set(), set())],
}
"""By hand: inputs, and what the derivatives by inputs and by parameters read."""


@pytest.mark.parametrize("name", PARTS)
def test_derivatives_read_what_they_need(name: str) -> None:
    nodes = PARTS[name].nodes(0, 1)
    assert [({*n.inputs}, {*n.input_reads}, {*n.leaf_reads}) for n in nodes] == READS[name]


def test_sums_and_joins_are_of_all_their_ends() -> None:
    norm = PARTS["norm"]
    assert chain(((of.Residual((norm, norm)),),))[-1].inputs == (0, 2)
    assert chain(((of.Residual(()),),))[-1].inputs == (0, 0)
    assert chain(((of.Branches(((norm,), (), (norm, norm))),),))[-1].inputs == (1, 0, 3)


def test_members_of_a_stream_are_read_as_the_updates_before_have_left_them() -> None:
    """Entries are in the order of names: 0 is m, 1 is x."""
    norm = PARTS["norm"]
    both = of.Branches(((), (of.Read("m"), norm)))
    block: of.Block = (
        of.Update("x", (of.Residual((both,)),)),  # 2: m, normed; 3: both; 4: the sum
        of.Update("m", (norm,)),  # 5
        of.Update("x", (of.Read("m"),)),  # x is m then
    )
    nodes = chain((block, block))
    inputs = [(), (), (0,), (1, 2), (1, 3), (0,), (5,), (5, 6), (5, 7), (5,)]
    assert [node.inputs for node in nodes] == inputs
    assert [node.block for node in nodes] == [0] * 6 + [1] * 4
    assert entry_members((block,)) == ["m", "x"] and entry_members((ALL,)) == []
    assert [*operations(block)] == [norm, norm]


@pytest.mark.parametrize(
    ("blocks", "read"),
    [
        (((of.Update("x", (PARTS["norm"],)),),), ["x"]),
        (((of.Update("x", (PARTS["bias"],)), of.Update("m", (PARTS["norm"],))),), ["m"]),
        (((of.Update("x", (PARTS["bias"],)),), (of.Update("x", (PARTS["norm"],)),)), ["x"]),
        (((of.Update("x", (of.Read("m"), PARTS["bias"], PARTS["norm"])),),), ["m"]),
        (((PARTS["bias"],),), []),
        (((PARTS["bias"], PARTS["norm"]),), [""]),
        (((PARTS["norm"], PARTS["bias"]),), [""]),
        (((),), []),
    ],
)
def test_members_that_gradients_read(blocks: tuple[of.Block, ...], read: list[str]) -> None:
    assert members_read(blocks, narrow=False) == read


def test_a_mixture_reads_its_own_tokens_beside_other_branches() -> None:
    """The router and the experts read what the mixture gathered, not a value of another branch."""
    nodes = chain(((of.Branches(((PARTS["column"],), (PARTS["experts"],))),),))
    (experts,) = (n for n, node in enumerate(nodes) if node.exchange is not None)
    routed, gathered = nodes[experts].inputs
    assert isinstance(nodes[gathered].collective, of.Gather) and nodes[routed].inputs == (gathered,)


def test_matrices_are_named_once_and_flops_count_a_token_s_experts() -> None:
    names = ["query", "key", "out", "down", "router", "up", "wide"]
    assert [w.leaf for w in matrices(FORMS["one after another"])] == names
    assert [*operations(FORMS["nested"])] == [*ALL, *ALL]
    rows, seq, size = 3, 5, EMBED * EMBED
    flops = sum(node.flops(rows, seq) for node in chain(((PARTS["experts"],),)))
    assert flops == 2 * rows * seq * (EMBED * 4 + 2 * 2 * size)
    flops = sum(node.flops(rows, seq) for node in chain(((PARTS["attention"],),)))
    assert flops == rows * 2 * 2 * seq * seq * 4 * 2


@pytest.mark.parametrize("narrow", [False, True])
def test_products_in_8_bits_are_quantised_before_the_gather_and_saved_after_the_scatter(
    narrow: bool,
) -> None:
    nodes = chain(((PARTS["column"], PARTS["row"]),), narrow)
    kinds = [
        type(node.collective).__name__
        if node.collective
        else "product"
        if node.products
        else "quantised"
        for node in nodes[1:]
    ]
    quantised = ["quantised"] if narrow else []
    assert kinds == [*quantised, "Gather", "product", *quantised, "product", "Scatter"]
    saved = [kind for kind, node in zip(kinds, nodes[1:], strict=True) if node.saved_as]
    assert saved == (["product", "Scatter"] if narrow else ["product", "product"])
    scales = [(len(node.scales.inputs), node.scales.gradients) for node in nodes[1:]]
    assert sum(n for n, _ in scales) == 2 * narrow
    assert [t for _, t in scales if t] == ([(of.Tensors(2),), (of.Tensors(1),)] if narrow else [])


@dataclass(frozen=True)
class Own(of.Operation):
    """An operation of one node, with the fields that are given."""

    fields: tuple[tuple[str, Any], ...] = ()

    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[of.Node]:
        return [of.Node(**{"inputs": (entry,), **dict(self.fields)})]


class Alone(Own):
    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> Any:
        return of.Node(inputs=(entry,))


class Empty(Own):
    def nodes(self, entry: int, number: int, *, narrow: bool = False) -> list[of.Node]:
        return []


ROWS = of.ExpertExchange(4, EMBED, 2, None, None, False, "router", ("up", "wide"), ())
NONSENSE: dict[str, tuple[Any, str]] = {
    "no operation": ("column", "'column'.* is no jaxtrain.operations.Operation"),
    "a list": (Own([]), "unhashable type: 'list'.* frozen dataclass"),  # type: ignore[arg-type]
    "no nodes": (Empty(), r"nodes\(\) returns \[\]; return a list of Node"),
    "one node": (Alone(), r"nodes\(\) returns Node\(.*; return a list of Node"),
    "a constant": (Own((("inputs", (0,)),)), r"inputs=\(0,\) has 0, which is neither `entry`"),
    "itself": (Own((("inputs", (17,)),)), r"has 17, .* to the node before it"),
    "nothing": (Own((("inputs", ()),)), r"inputs=\(\); a node is computed"),
    "a later one": (Own((("input_reads", (18,)),)), r"input_reads=\(18,\) .* to the node itself"),
    "another's": (Own((("leaves", ("a",)), ("leaf_reads", (16,)))), r"leaf_reads=\(16,\) has 16"),
    "a policy": (Own((("saved_as", "dots"),)), "'dots'; remat policies know '', 'attention', 'pro"),
    "sends for none": (Own((("leaf_collective", of.Gather(4)),)), "leaves=.*name the leaves"),
    "W of none": (Own((("deferred", True),)), "leaves=.*name the leaves"),
    "a word": (Own((("collective", "gather"),)), "collective='gather'; give one of Gather, Scat"),
    "rows": (Own((("input_collective", ROWS),)), "input_collective=ExpertExchange.*KeyGather, or"),
    "a scatter": (
        Own((("leaves", ("a",)), ("leaf_collective", of.Scatter(4)))),
        "leaf_collective=Scatter.*; give one of Gather, KeyGather, or None",
    ),
    "W's scatter": (
        Own((("deferred_gather", of.Scatter(4)),)),
        "deferred_gather=Scatter.*; give one of Gather, or None",
    ),
    "less than nothing": (Own((("token_flops", -1),)), "inner_flops=0 of token_flops=-1"),
    "more within": (Own((("inner_flops", 1),)), "inner_flops=1 of token_flops=0"),
    "no leaf of its own": (
        Own((("products", (of.Multiplication(weight("up")),)),)),
        "products by up, in the leaves of none of its nodes",
    ),
    "an error": (of.ColumnParallel(()), r"nodes\(\) raises IndexError"),
}


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("name", NONSENSE)
def test_nodes_that_are_no_graph_are_named(name: str, wrap: bool) -> None:
    operation, expected = NONSENSE[name]
    if wrap:
        operation = of.Residual((PARTS["norm"], operation))
    assert re.search(expected, wrong_nodes(operation))


@pytest.mark.parametrize("form", FORMS)
def test_operations_of_the_package_are_graphs(form: str) -> None:
    assert [wrong_nodes(operation) for operation in FORMS[form]] == [""] * len(FORMS[form])
    read = (("input_reads", (3, 17)), ("leaf_reads", (3, 17)), ("leaves", ("a",)))
    assert wrong_nodes(Own(read)) == ""
