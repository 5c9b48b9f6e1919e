"""Runs that go from mesh to mesh and between one, two and four processes: to the bit what was
saved, the same batches, the losses of one device.

Every device of every process tells what it holds (`elastic_worker`). That is held against bytes
read here from the files of the checkpoint, without the library, and against a run of one device
that nothing interrupted.
"""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import elastic_worker
import numpy as np
import process_group
import pytest
from elastic_worker import BATCHES, KINDS, Held, Piece, Pieces, trained

from jaxtrain import Pipeline
from jaxtrain.optim.optimizer import ELEMENTWISE, SHARDED
from jaxtrain.optim.precision import BOUNDS

BOUND = BOUNDS["float32"]
by_hand = pytest.mark.exhaustive
Arrays = dict[str, np.ndarray]


class Hop(NamedTuple):
    """A step on a mesh; the layers are three, so only stage=3 holds as many on each stage."""

    processes: int
    axes: tuple[tuple[str, int], ...]
    pipeline: tuple[str, int] = ("one_f_one_b", 1)

    @property
    def devices(self) -> int:
        return math.prod(n for _, n in self.axes)

    def __str__(self) -> str:
        return f"{self.processes} x ({', '.join(f'{a}={n}' for a, n in self.axes)})"


def on(processes: int, pipeline: tuple[str, int] = ("one_f_one_b", 1), **axes: int) -> Hop:
    return Hop(processes, tuple(axes.items()), pipeline)


CHUNKS, GPIPE = ("interleaved", 2), ("gpipe", 1)
NAMED = [on(2, GPIPE, fsdp=2, stage=2), on(1, data=4, tensor=2), on(2, GPIPE, fsdp=2, stage=2)]
AROUND = [
    on(2, CHUNKS, stage=2, data=2),  # the chunks of a layer's neighbours are another process's
    on(4, stage=2, tensor=2),
    on(1, data=1),
    on(1, stage=4),
    on(1, CHUNKS, fsdp=2, stage=2, tensor=2),
    on(4, GPIPE, data=2, stage=2),
    on(2, data=2, tensor=2),
    on(2, stage=4),
    on(1, data=2, stage=3),
    on(1, fsdp=4),
    on(1, data=2, fsdp=2, tensor=2),
]
SUMMED = [
    on(2, data=2, fsdp=2),
    on(2, data=2, fsdp=2),
    on(1, data=2, fsdp=2),
    on(4, data=4),
    on(1, data=2, stage=2),
]


# Processes, and what they tell.


def ran(folder: Path, processes: int, runs: list[Any]) -> list[list[Held]]:
    """What each process held in each of `runs`: (run, kind, hop, steps), one after another. One
    process is this one."""
    if processes > 1:
        return spawned(folder, processes, runs)
    return [
        [trained(kind, dict(hop.axes), Pipeline(*hop.pipeline), folder / run, steps=steps)]
        for run, kind, hop, steps in runs
    ]


def spawned(folder: Path, processes: int, runs: list[Any]) -> list[list[Held]]:
    """As `ran`, by new processes."""
    group = f"group{len(list(folder.glob('*.json')))}"
    (devices,) = {hop.devices for _, _, hop, _ in runs}  # a mesh has those of every process
    given = [(run, kind, dict(hop.axes), hop.pipeline, steps) for run, kind, hop, steps in runs]
    task = {"processes": processes, "devices": devices, "runs": given}
    (folder / f"{group}.json").write_text(json.dumps(task))
    main = "from elastic_worker import main; main()"
    process_group.run(
        folder,
        processes,
        lambda index, port: ["-c", main, folder, group, index, port],
        modules=Path(elastic_worker.__file__).parent,
        seconds=300,
    )
    told = [
        pickle.loads((folder / f"{group}.{index}.pickle").read_bytes())
        for index in range(processes)
    ]
    return [[held[at] for held in told] for at in range(len(runs))]


def journeyed(
    folder: Path, runs: dict[str, str], hops: list[Hop], done: int = 0
) -> Iterator[tuple[str, int, Hop, list[Held]]]:
    """Runs by name, each of a kind; a step of each on each mesh, after `done` of them: (run, step,
    hop, what each process held)."""
    numbered = enumerate(hops, done + 1)
    for processes, group in groupby(numbered, key=lambda each: each[1].processes):
        due = [(run, kind, hop, step) for step, hop in group for run, kind in runs.items()]
        for (run, _, hop, step), held in zip(due, ran(folder, processes, due), strict=True):
            yield run, step, hop, held


def whole(flat: list[Piece]) -> np.ndarray:
    """An array of what all devices hold; those that hold the same hold equal bytes."""
    ends = [np.add(piece.start, piece.data.shape) for piece in flat]
    out = np.zeros(tuple(np.max(ends, axis=0).astype(int)), flat[0].data.dtype)
    filled = np.zeros(out.shape, bool)
    for start, data in flat:
        at = tuple(slice(a, a + n) for a, n in zip(start, data.shape, strict=True))
        if filled[at].any():
            assert filled[at].all() and np.array(out[at]).tobytes() == data.tobytes()
        out[at], filled[at] = data, True
    assert filled.all(), "no device holds it"
    return out


def arrays(held: list[Pieces]) -> Arrays:
    """Of the pieces by name that each process held."""
    assert all(each.keys() == held[0].keys() for each in held)
    return {name: whole([p for each in held for p in each[name]]) for name in held[0]}


def stored(run: Path, step: int) -> Arrays:
    """What the files of a checkpoint hold, read without the library."""
    place = run / "checkpoints" / str(step) / "state"
    body = json.loads((place / "manifest.json").read_bytes().partition(b"\n")[2])
    out = {}
    for name, (shape, dtype, key) in body["leaves"].items():
        assert key is None
        out[name], filled = np.zeros(shape, dtype), np.zeros(shape, int)
        for start, size, _, pack, offset, count in body["chunks"][name]:
            data = (place / pack).read_bytes()[offset : offset + count]
            at = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
            out[name][at] = np.frombuffer(data, dtype).reshape(size)
            filled[at] += 1
        assert (filled == 1).all(), name
    return out


def assert_bits(found: Arrays, due: Arrays) -> None:
    assert found.keys() == due.keys()
    for name, array in found.items():
        assert (array.dtype, array.shape) == (due[name].dtype, due[name].shape), name
        assert array.tobytes() == due[name].tobytes(), name


def assert_saved_and_restored(folder: Path, kind: str, step: int, held: list[Held]) -> None:
    """To the bit, all of it: what was read is what the files held, and what is in them now is what
    there was."""
    assert [each.start for each in held] == [step - 1] * len(held)
    if step > 1:
        assert_bits(arrays([each.began for each in held]), stored(folder / kind, step - 1))
    assert_bits(arrays([each.ended for each in held]), stored(folder / kind, step))


def assert_next_batches(held: list[Held], alone: Held) -> None:
    start = held[0].start
    for at in range(BATCHES):
        found = arrays([each.batches[at] for each in held])
        assert_bits(found, arrays([alone.batches[start + at]]))


@pytest.fixture
def uninterrupted(tmp_path: Path) -> Any:
    """(kind, steps) -> what a run held; on one device unless told."""

    def run(kind: str, steps: int, axes: dict[str, int] | None = None) -> Held:
        place = tmp_path / "uninterrupted" / kind
        begun = partial(trained, kind, axes or {"data": 1}, Pipeline(), place)
        return begun(steps=steps, batches=steps + BATCHES)

    return run


# The laws.

JOURNEYS: list[Any] = [
    pytest.param(["adamw"], NAMED, id="two processes, one, two", marks=by_hand),
    pytest.param(["adamw"], AROUND, id="around", marks=by_hand),
    # What these two keep AdamW keeps too: one way is enough.
    pytest.param(["sgd", "lion"], NAMED[:2], id="other elementwise optimizers", marks=by_hand),
    pytest.param(
        ["adafactor", "lamb", "lars", "muon"], NAMED, id="optimizers of whole leaves", marks=by_hand
    ),
]


def test_the_table_has_the_pairs_and_optimizers_it_should() -> None:
    pairs = {pair for journey in (NAMED, AROUND) for pair in pairwise(journey)}
    counts = {(a.processes, b.processes) for a, b in pairs}
    assert len(pairs) >= 12 and len(counts) == 8, "all but from four to four"
    assert {axis for pair in pairs for hop in pair for axis, n in hop.axes if n > 1} == {
        *("data", "fsdp", "stage", "tensor")
    }
    gone = {kind for journey in JOURNEYS for kind in journey.values[0]}
    optimizers = {type(KINDS[kind]["optimizer"]) for kind in gone}
    assert optimizers == {*ELEMENTWISE, *SHARDED}


@pytest.mark.parametrize(("kinds", "hops"), JOURNEYS)
def test_a_run_goes_on_on_other_meshes_and_processes(
    kinds: list[str], hops: list[Hop], tmp_path: Path, uninterrupted: Any
) -> None:
    alone = {kind: uninterrupted(kind, len(hops)) for kind in kinds}
    for kind, step, hop, held in journeyed(tmp_path, {k: k for k in kinds}, hops):
        assert len(held) == hop.processes
        assert_saved_and_restored(tmp_path, kind, step, held)
        assert_next_batches(held, alone[kind])
        assert all(each.losses == held[0].losses for each in held)
        due = pytest.approx(alone[kind].losses[step - 1 : step], rel=BOUND)
        assert held[0].losses == due, f"{kind} on {hop}"


@by_hand
def test_compressed_sums_go_on_on_other_meshes_and_processes(
    tmp_path: Path, uninterrupted: Any
) -> None:
    """What their errors sum to is kept, and all else to the bit; on the same mesh so are they. New
    processes on the same mesh, as many as before, go on to the bit."""
    mesh, run = SUMMED[0], tmp_path / "run"
    alone = uninterrupted("powersgd", len(SUMMED), dict(mesh.axes))
    (at_once,) = spawned(tmp_path, mesh.processes, [("at once", "powersgd", mesh, 2)])
    losses = at_once[0].losses[:1]
    shutil.copytree(tmp_path / "at once", run)
    shutil.rmtree(run / "checkpoints" / "2")  # as if it had been killed before
    for step, (before, hop) in enumerate(pairwise(SUMMED), 2):
        ((_, _, _, held),) = journeyed(tmp_path, {"run": "powersgd"}, [hop], done=step - 1)
        found, due = arrays([each.began for each in held]), stored(run, step - 1)
        assert_restored(found, due, same=before.axes == hop.axes)
        ended = arrays([each.ended for each in held])
        assert_bits(ended, stored(run, step))
        if step == 2:
            assert held[0].losses == at_once[0].losses[1:]
            assert_bits(ended, arrays([each.ended for each in at_once]))
        assert_next_batches(held, alone)
        losses += held[0].losses
    np.testing.assert_allclose(losses, alone.losses, rtol=2e-2)


def assert_restored(found: Arrays, due: Arrays, *, same: bool) -> None:
    """A state with errors and factors. same: on the mesh it was saved on."""
    assert found.keys() == due.keys()
    errors = [name for name in found if name.startswith("residuals.errors.")]
    factors = [name for name in found if name.startswith("residuals.factors.")]
    assert len(errors) >= 4 and any(due[name].any() for name in errors)
    dealt = set() if same else {*errors, *factors}
    kept = found.keys() - dealt
    assert_bits({k: found[k] for k in kept}, {k: due[k] for k in kept})
    for name in dealt & set(errors):
        assert found[name].shape[1:] == due[name].shape[1:]
        total, sums = (each[name].astype(np.float64).sum(0) for each in (found, due))
        np.testing.assert_allclose(total, sums, atol=1e-7, err_msg=name)
    for name in dealt & set(factors):
        if found[name].shape == due[name].shape:
            np.testing.assert_array_equal(found[name], due[name])
