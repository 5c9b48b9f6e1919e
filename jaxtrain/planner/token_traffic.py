"""Predicts what sends tokens: tensor-parallel blocks, and the head and loss over a split
vocabulary.

Sequence parallelism (Korthikanti et al. 2022): tokens are gathered before a column-split product
and scattered after a row-split one, twice a block, and the other way round in the backward pass.
`roles` are those of the mesh, or `Roles.outside_stack` of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence

from jaxtrain.mesh.roles import Roles
from jaxtrain.operations.block import Block, chain
from jaxtrain.operations.collectives import Communication, Gather, Scatter, Sum
from jaxtrain.operations.node import Node, Tensors
from jaxtrain.operations.recompute import collectives_of
from jaxtrain.planner import context_traffic as context
from jaxtrain.planner import expert_traffic as experts
from jaxtrain.planner.backward_work import BackwardWork
from jaxtrain.planner.facts import StepFacts
from jaxtrain.planner.sent import Sent, collective_traffic, times, ways


def token_collectives(
    facts: StepFacts, why: str, roles: Roles, collectives: Iterable[Gather | Scatter]
) -> Iterator[Sent]:
    """Yields the gathers and reduce-scatters of a microbatch's tokens on a device."""
    axes = roles.stream
    algorithm = facts.algorithms.tensor if axes == facts.roles.stream else "lax"
    for collective, count in Counter(collectives).items():
        kind = "all_gather" if isinstance(collective, Gather) else "reduce_scatter"
        narrow = isinstance(collective, Gather) and collective.narrow
        dtype, size = "uint8" if narrow else facts.compute, facts.tokens * collective.width
        sent = collective_traffic(facts, why, kind, algorithm, axes, dtype, size)
        yield from times(sent, count)


def head_sums(facts: StepFacts, why: str, roles: Roles, sums: Iterable[Sum]) -> Iterator[Sent]:
    """Yields all-reduces over the devices that split heads."""
    for collective in sums:
        size = collective.width * facts.tokens
        yield from collective_traffic(facts, why, "all_reduce", "lax", roles.heads, "float32", size)


def maxima(facts: StepFacts, why: str, roles: Roles, tensors: Iterable[Tensors]) -> Iterator[Sent]:
    """Yields all-reduces of maximum magnitudes for products in 8 bits, `count` together for each of
    `tensors`.

    They run over all devices that have parts of the tensors. In a pipeline these are a stage's
    devices, unless the stages split the stream too; for experts, the devices with the same ones.
    Nothing if scales are those of previous steps.
    """
    if facts.scaling != "current":
        return
    every = tuple(a for a in facts.sizes if a in roles.stream or a not in roles.layers)
    apart = tuple(a for a in every if a in roles.experts)
    for count, of_experts in tensors:
        over, size = every, count
        if of_experts:
            over, size = tuple(a for a in every if a not in apart), count // ways(facts, apart)
        yield from collective_traffic(facts, why, "all_reduce", "lax", over, "float32", size)


def embedding_lookup(
    facts: StepFacts, roles: Roles, why: str = "embedding", members: Container[str] | None = None
) -> Iterator[Sent]:
    """Yields the token scatters of tables that are split over the vocabulary. members: of the
    stream, None for all."""
    lookups = [
        Scatter(member.width)
        for name, member in facts.model.members.items()
        for _ in (member.lookups if members is None or name in members else ())
    ]
    yield from token_collectives(facts, why, roles, lookups)


def embedding_lookup_backward(facts: StepFacts, roles: Roles) -> Iterator[Sent]:
    """Yields the gather for the trained tables' gradients: one for each member of the stream, as
    its look-ups are summed."""
    trained = [m for m in facts.model.members.values() if facts.trains(*m.lookups)]
    gathers = [Gather(member.width) for member in trained]
    yield from token_collectives(facts, "embedding, backward", roles, gathers)


def forward(
    facts: StepFacts, roles: Roles, blocks: Iterable[Block], why: str = ""
) -> Iterator[Sent]:
    """Yields the forward collectives of these blocks. why: added to the names of its lines."""
    for block in blocks:
        nodes = chain((block,), facts.narrow)
        yield from forward_to(facts, roles, nodes, range(len(nodes)), why)


def forward_to(
    facts: StepFacts, roles: Roles, nodes: Sequence[Node], needed: Iterable[int], why: str
) -> Iterator[Sent]:
    """Yields the collectives of the forward pass for the nodes of a chain with these numbers."""
    needed = list(needed)
    inputs = [tensors for number in needed for tensors in nodes[number].scales.inputs]
    collectives = collectives_of(nodes, needed)
    yield from maxima(facts, f"greatest inputs{why}", roles, inputs)
    yield from _forward(facts, roles, collectives, why)
    yield from experts.forward(facts, collectives, why)


def _forward(
    facts: StepFacts, roles: Roles, collectives: Sequence[Communication], why: str
) -> Iterator[Sent]:
    """Yields the collectives of the forward pass, except what experts send."""
    gathers, scatters, sums = _by_kind(collectives)
    yield from token_collectives(facts, f"columns{why}", roles, gathers)
    yield from token_collectives(facts, f"rows{why}", roles, scatters)
    yield from head_sums(facts, f"squares over heads{why}", roles, sums)
    yield from context.forward(facts, roles, collectives, why)


def backward(facts: StepFacts, roles: Roles, work: BackwardWork) -> Iterator[Sent]:
    """Yields the collectives of the backward pass of one turn of the remat policy's body."""
    gathers, scatters, sums = _by_kind(work.gradients)
    yield from maxima(facts, "greatest gradients", roles, work.maxima)
    yield from token_collectives(facts, "rows, backward", roles, gathers)
    yield from token_collectives(facts, "columns, backward", roles, scatters)
    again, _, _ = _by_kind(work.leaf_gradients)
    yield from token_collectives(facts, "columns, for weight gradients", roles, again)
    yield from context.forward(facts, roles, work.leaf_gradients, ", for gradients")
    yield from maxima(facts, "greatest inputs, again", roles, work.maxima_again)
    yield from head_sums(facts, "squares over heads, backward", roles, sums)
    yield from context.backward(facts, roles, work.gradients)
    yield from _forward(facts, roles, work.again, ", again")
    for mixture in work.mixtures:
        yield from experts.backward(facts, mixture)


def _by_kind(collectives: Iterable[Communication]) -> tuple[list[Gather], list[Scatter], list[Sum]]:
    """Returns those of the collectives over the devices that split heads."""
    collectives = list(collectives)
    return (
        [collective for collective in collectives if isinstance(collective, Gather)],
        [collective for collective in collectives if isinstance(collective, Scatter)],
        [collective for collective in collectives if isinstance(collective, Sum)],
    )


def head(facts: StepFacts, roles: Roles) -> Iterator[Sent]:
    """Yields the collectives of head and loss. Every slice of the vocabulary sees all tokens."""
    yield from token_collectives(facts, "head", roles, [Gather(facts.model.embed)])
    alone = () if facts.model.tied else (facts.model.head.leaf,)
    if any(leaf.trained for name, leaf in facts.leaves.items() if name not in alone):
        yield from token_collectives(facts, "head gradients", roles, [Scatter(facts.model.embed)])
    chunk = facts.tokens // facts.chunks
    for why, elements in (("greatest logit", chunk), ("sums over the vocabulary", 2 * chunk)):
        sums = collective_traffic(facts, why, "all_reduce", "lax", roles.vocab, "float32", elements)
        yield from times(sums, facts.chunks * facts.model.head.passes(facts.chunks))
    if facts.model.head.of_pairs and (cut := facts.sequence):
        row = cut.local * ways(facts, cut.axes)
        size, why = 2 * (row + row % 2) * facts.tokens // cut.local, "sums over documents"
        yield from collective_traffic(facts, why, "all_reduce", "lax", cut.axes, "float32", size)
