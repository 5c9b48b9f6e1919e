"""Finds the collectives on activations that a backward pass needs: all of them, unless leaves are
frozen.

Demand is followed down the nodes of a chain (`operations.block.chain`). Gradients flow down to the
lowest trained leaf, and no further. On their way they read values that the remat policy has saved,
or that are recomputed from earlier values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from jaxtrain.models.description import ADAPTER_A, ADAPTER_B, STACK
from jaxtrain.operations.block import chain
from jaxtrain.operations.collectives import Communication, ExpertExchange
from jaxtrain.operations.flows import Flow, gradient_flows, rescaled, rounded_gradients, sent_back
from jaxtrain.operations.node import Node, Tensors
from jaxtrain.operations.recompute import collectives_of, made_again, made_again_for_others
from jaxtrain.planner.facts import StepFacts
from jaxtrain.quantization.delayed import SCALES


class MixtureWork(NamedTuple):
    """Backward work of a mixture whose experts are on several devices.

    tokens: the gradients of its input are needed; rows: those of what experts give for rows;
    shares: those of each choice's share in a token's output; any: one of these, or of its leaves.
    again: it is computed again, for outputs or for its own gradients. outputs: recomputed values
    are made from its outputs.
    """

    exchange: ExpertExchange
    tokens: bool
    rows: bool
    shares: bool
    any: bool
    again: bool
    outputs: bool


class BackwardWork(NamedTuple):
    """Backward work of one turn of the remat policy's body.

    gradients: collectives of the gradients of nodes' inputs; leaf_gradients: of their leaves.
    again: collectives of the forward pass, repeated.
    read: names of the leaves that are read. recomputed: numbers in the chain of recomputed values.
    maxima: in 8 bits, for each product of how many gradients the maximum magnitudes are taken
      together. maxima_again: the same of recomputed inputs.
    mixtures: work of each mixture.
    """

    gradients: tuple[Communication, ...] = ()
    leaf_gradients: tuple[Communication, ...] = ()
    again: tuple[Communication, ...] = ()
    read: frozenset[str] = frozenset()
    recomputed: frozenset[int] = frozenset()
    maxima: tuple[Tensors, ...] = ()
    maxima_again: tuple[Tensors, ...] = ()
    mixtures: tuple[MixtureWork, ...] = ()


def works(facts: StepFacts) -> dict[str, list[tuple[BackwardWork, int]]]:
    """Returns the backward work of all blocks: by path for each block outside the stack, and by
    "period." for the stack. Each value lists (work of one turn, number of turns with this work),
    from the first turn on."""
    model = facts.model
    below = facts.trains(*model.entering_alone)
    by_path: dict[str, list[tuple[BackwardWork, int]]] = {}
    for path in model.prefix:
        by_path[path] = [(body_work(facts, [path], below=below), 1)]
        below = below or facts.trains(path)
    by_path[STACK] = stack_works(facts, model.periods, below=below)
    below = below or facts.trains(STACK)
    for path in model.suffix:
        by_path[path] = [(body_work(facts, [path], below=below), 1)]
        below = below or facts.trains(path)
    return by_path


def stack_works(
    facts: StepFacts, turns: int, *, below: bool, split: bool = False
) -> list[tuple[BackwardWork, int]]:
    """Returns the work of a stack's turns, or of a chunk's, and how many are alike. In a loop of
    several all are; else the first may need less. split: as in `body_work`."""
    loop, period = facts.loop, list(facts.model.stacked)
    if not below and not facts.trains(STACK):
        return [(BackwardWork(), turns)]
    above = body_work(facts, period, below=True, split=split)
    if not loop.unroll and turns - loop.prefetch > 1:
        return [(above, turns)]
    first = body_work(facts, period, below=below, split=split)
    return [(first, 1), (above, turns - 1)]


def fetched_again(
    facts: StepFacts, turn_works: list[tuple[BackwardWork, int]]
) -> list[tuple[frozenset[str], int]]:
    """Returns the leaves of a layer that the backward pass of a stack reads, and how often it
    gathers them. turn_works: from the first turn on; the last turns' weights may be kept."""
    remaining = facts.loop.fetched_again(sum(n for _, n in turn_works))
    fetched = []
    for number, (work, turns) in enumerate(turn_works, start=1):
        count = remaining if number == len(turn_works) else min(turns, remaining)
        remaining -= count
        fetched += [(work.read, count)] if work.read and count else []
    return fetched


def body_work(
    facts: StepFacts, paths: Sequence[str], *, below: bool, split: bool = False
) -> BackwardWork:
    """Returns the backward work of the blocks at these paths. below: the gradient of their input is
    needed. split: W computes the gradients of products' weights; in 8 bits, of inputs that B has
    read, and else that F has saved."""
    nodes = chain(tuple(facts.model.blocks[path] for path in paths), facts.narrow)
    sequence = facts.sequence
    flows = gradient_flows(
        nodes,
        lambda block, name: _trains(facts, paths[block], (name,)),
        below=below,
        traded=sequence is not None and sequence.group > 1,
        observes=lambda node: _observes(facts, paths[node.block], node),
    )
    sent = [sent_back(node, flow, split=split) for node, flow in zip(nodes, flows, strict=True)]
    reads: list[set[int]] = []  # values that the gradients of each value read
    maxima, maxima_again = list[Tensors](), list[Tensors]()
    read: set[str] = set()

    def trains(node: Node) -> Callable[[str], bool]:
        return lambda name: facts.trains(paths[node.block] + name)

    for node, flow in zip(nodes, flows, strict=True):
        input_reads = node.input_reads if flow.inputs else ()
        late = split and node.deferred and not facts.narrow
        computed = (flow.own or flow.observed) and not late
        reads.append({*input_reads, *(node.leaf_reads if computed else ())})
        maxima += rounded_gradients(node, flow, trains(node))
        read |= _leaves_read(facts, paths[node.block], node, bool(flow.inputs))
    again = sorted(made_again(nodes, set().union(*reads), facts.loop.remat))
    outputs = made_again_for_others(nodes, reads, facts.loop.remat)
    for number in again:
        node = nodes[number]
        read |= _leaves(facts, paths[node.block], node)
        maxima_again += rescaled(node, flows[number], trains(node), outputs=number in outputs)
    return BackwardWork(
        gradients=tuple(inputs for inputs, _ in sent if inputs is not None),
        leaf_gradients=tuple(leaves for _, leaves in sent if leaves is not None),
        again=collectives_of(nodes, again),
        read=frozenset(read),
        recomputed=frozenset(again),
        maxima=tuple(maxima),
        maxima_again=tuple(maxima_again),
        mixtures=tuple(_mixtures(facts, paths, nodes, flows, outputs, {*again})),
    )


def _observes(facts: StepFacts, path: str, node: Node) -> bool:
    """Returns True if scales see the gradients of all outputs of a node: delayed ones, which are
    trained themselves, or those that outputs of the moment have together."""
    end = SCALES if facts.scaling == "delayed" else ""
    return bool(node.scales.gradients) and facts.trains(*(path + k + end for k in node.leaves))


def _leaves_read(facts: StepFacts, path: str, node: Node, flow: bool) -> set[str]:
    """Returns the leaves that the gradients of a node read. flow: that of its input is needed."""
    leaves = _leaves(facts, path, node)
    trained = {name for name in leaves if facts.leaves[name].trained}
    # Chunks are computed again, whatever is trained of them.
    in_chunks = node.exchange is not None and facts.expert_chunks(node.exchange.routing_group) > 1
    if (flow and (node.products or node.input_reads)) or (trained and in_chunks):
        return leaves
    # The gradient of an adapter's matrix A reads B, that of an expert's first matrices its last.
    adapters = [name for name in trained if name.endswith(ADAPTER_A)]
    read = {name.removesuffix(ADAPTER_A) + ADAPTER_B for name in adapters}
    if node.exchange is not None:
        for *others, last in filter(None, (node.exchange.matrices, node.exchange.shared)):
            read |= {path + last} if _trains(facts, path, others) else set()
    return read & {*facts.leaves}


def _leaves(facts: StepFacts, path: str, node: Node) -> set[str]:
    """Returns the names of a node's leaves, with those of adapters."""
    names = (*node.leaves, *(weight.leaf for weight, _ in node.products))
    return facts.named(*with_adapters(path, names))


def _mixtures(
    facts: StepFacts,
    paths: Sequence[str],
    nodes: Sequence[Node],
    flows: Sequence[Flow],
    outputs: Set[int],
    again: Set[int],
) -> Iterator[MixtureWork]:
    """Yields the work of each mixture of a chain. outputs, again: values that are recomputed for
    the gradients of others, and for any."""
    for number, node in enumerate(nodes):
        if (exchange := node.exchange) is None:
            continue
        path, tokens = paths[node.block], bool(flows[number].inputs)
        rows = tokens or _trains(facts, path, exchange.matrices)
        shares = tokens or _trains(facts, path, (exchange.router,))
        others = dict(any=bool(flows[number]), again=number in again, outputs=number in outputs)
        yield MixtureWork(exchange, tokens=tokens, rows=rows, shares=shares, **others)


def _trains(facts: StepFacts, path: str, names: Iterable[str]) -> bool:
    """Returns True if a leaf of the block at `path` is trained, or its adapter's matrix."""
    return facts.trains(*with_adapters(path, names))


def with_adapters(path: str, names: Iterable[str]) -> list[str]:
    """Returns the full names of these leaves, and of adapters that they may have."""
    return [path + name + end for name in names for end in ("", ADAPTER_A, ADAPTER_B)]
