"""One process of `test_elastic`: takes runs from mesh to mesh, and tells what it held on the way.

    python -c "from elastic_worker import main; main()" FOLDER GROUP INDEX PORT

FOLDER/GROUP.json says what the processes of a group do, FOLDER/GROUP.INDEX.pickle what this one
held: its own devices' parts only, so that nothing has to be compiled to tell it. (Not run as a
script: what is pickled is of the module that reads it.)
"""

from __future__ import annotations

import io
import json
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

import jaxtrain
from jaxtrain.checkpoint import SavePolicy, named_leaves
from jaxtrain.run import loop
from jaxtrain.session.session import Session

BATCHES, STEPS = 10, 40

ADAFACTOR = jaxtrain.optim.Adafactor(1e-2, momentum=0.9, min_dim_size_to_factor=4)
KINDS: dict[str, dict[str, Any]] = {
    "adamw": dict(optimizer=jaxtrain.AdamW(1e-2), ema_decay=0.9),
    "sgd": dict(optimizer=jaxtrain.SGD(0.1, momentum=0.9)),
    "lion": dict(optimizer=jaxtrain.optim.Lion(1e-3)),
    "adafactor": dict(optimizer=ADAFACTOR),
    "lamb": dict(optimizer=jaxtrain.optim.Lamb(1e-2)),
    "lars": dict(optimizer=jaxtrain.optim.Lars(1.0)),
    "muon": dict(optimizer=jaxtrain.Muon(1e-2)),
    "powersgd": dict(reducer=jaxtrain.compression.Compressed(jaxtrain.compression.PowerSGD(2))),
}
"""What a run is of: every optimizer that is exported, averaged weights, and compressed sums, which
carry errors and factors."""


def experiment_of(kind: str, pipeline: jaxtrain.Pipeline) -> jaxtrain.Experiment:
    """Three layers: on two and four stages there is padding, on three there is none. They begin
    large: a layer in another's place shows in the loss."""
    changes = dict(KINDS[kind])
    reducer = changes.pop("reducer", jaxtrain.collectives.Lax())
    attention = jaxtrain.AttentionConfig(heads=4, head_dim=2)
    block = jaxtrain.BlockConfig(attention, jaxtrain.MlpConfig(hidden=16))
    given = jaxtrain.Experiment(
        model=jaxtrain.DecoderConfig(
            vocab=16,
            embed=8,
            layers=3,
            period=(block,),
            tied=True,
            vocab_multiple=48,
            init=jaxtrain.nn.Initialisation(std=0.3),
        ),
        data=jaxtrain.data.BigramChain(vocab=16, seq=12, isolate_documents=True),
        optimizer=jaxtrain.AdamW(1e-2),
        steps=STEPS,
        batch=8,
        microbatches=2,
        execution=jaxtrain.Execution(reducer=reducer, small_leaf=100, pipeline=pipeline),
        evaluation=None,
        checkpoints=SavePolicy(every=1, keep=STEPS),
        logging=jaxtrain.Logging(every=1, tensorboard=False),
    )
    return replace(given, **changes)


class Piece(NamedTuple):
    """What one device holds of an array: elements from `start` on."""

    start: tuple[int, ...]
    data: np.ndarray


Pieces = dict[str, list[Piece]]


def pieces(array: jax.Array) -> list[Piece]:
    """What each device of this process holds."""
    found = []
    for shard in array.addressable_shards:
        start = tuple(part.indices(n)[0] for part, n in zip(shard.index, array.shape, strict=True))
        found.append(Piece(start, np.array(shard.data)))
    return found


class Held(NamedTuple):
    """What a process held of a run on one mesh: of the state it began and ended with, in natural
    order, and of the batches that came next; and the losses of its steps."""

    start: int
    began: Pieces
    batches: list[Pieces]
    losses: list[float]
    ended: Pieces


def held_state(session: Session) -> Pieces:
    leaves = named_leaves(jax.block_until_ready(session.state))
    return {name: in_layers(session, name, pieces(leaf)) for name, leaf in leaves.items()}


def in_layers(session: Session, name: str, held: list[Piece]) -> list[Piece]:
    """Of a leaf that is stacked over layers, which rest in slots: a piece for each layer, none of
    padding."""
    stacked = ".period." in name and not name.startswith("residuals.factors.")
    if session.assembly.pipeline is None or not stacked:
        return held
    layer_of = session.assembly.pipeline.layout.layer_of
    at = int(name.startswith("residuals.errors."))  # behind the dim of devices
    if len(layer_of) == 1:  # without chunks there is no dim for them
        held = [Piece((*p.start[:at], 0, *p.start[at:]), np.expand_dims(p.data, at)) for p in held]
    found = []
    for start, data in held:
        for chunk, slot in np.ndindex(*data.shape[at : at + 2]):
            layer = int(layer_of[start[at] + chunk, start[at + 1] + slot])
            if layer >= 0:
                one = data[(slice(None),) * at + (chunk, slice(slot, slot + 1))]
                found.append(Piece((*start[:at], layer, *start[at + 2 :]), one))
    return found


def next_batches(session: Session, count: int) -> list[Pieces]:
    """Of the session's own loader; the session gets another one that begins where that did."""
    found = []
    for due in range(session.start, session.start + count):
        step, batch = session.loader.next()
        assert step == due, f"batch {step} came for {due}"
        found.append({name: pieces(array) for name, array in batch.items()})
    session.loader.begin_at(session.start, session.loader.skips)
    return found


@contextmanager
def watched_sessions(seen: list[Any], batches: int) -> Iterator[None]:
    """What a run began with, put into `seen` before it takes a step."""
    plain = loop.open_session

    def opened(*arguments: Any, **options: Any) -> Session:
        session = plain(*arguments, **options)
        seen.append((held_state(session), next_batches(session, batches)))
        return session

    loop.open_session = opened
    try:
        yield
    finally:
        loop.open_session = plain


def trained(
    kind: str,
    axes: dict[str, int],
    pipeline: jaxtrain.Pipeline,
    run: Path,
    *,
    steps: int,
    batches: int = BATCHES,
) -> Held:
    """The run begun, or gone on with, up to `steps`; so many `batches` are told."""
    seen: list[Any] = []
    with watched_sessions(seen, batches):
        result = jaxtrain.train(
            experiment_of(kind, pipeline),
            jaxtrain.mesh_from_axes(**axes),
            run_dir=run,
            steps=steps,
            cache_dir=run.parent,
            stream=io.StringIO(),
        )
    assert result.session is not None
    losses = [line["loss"] for line in result.history]
    ((began, batches_read),) = seen
    return Held(result.session.start, began, batches_read, losses, held_state(result.session))


def main() -> None:
    folder, group, index = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    task = json.loads((folder / f"{group}.json").read_text())
    processes = task["processes"]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", task["devices"] // processes)
    jax.config.update("jax_disable_most_optimizations", True)
    if processes > 1:
        address = f"127.0.0.1:{sys.argv[4]}"
        jax.distributed.initialize(address, num_processes=processes, process_id=index)
    found = [
        trained(kind, axes, jaxtrain.Pipeline(*pipeline), folder / run, steps=steps)
        for run, kind, axes, pipeline, steps in task["runs"]
    ]
    (folder / f"{group}.{index}.pickle").write_bytes(pickle.dumps(found))
