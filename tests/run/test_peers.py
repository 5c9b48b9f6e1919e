"""Processes that have met at one port: those of another run are refused, a run's own are not."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optax
import process_group
import pytest
from service import play
from tiny import BATCH

import jaxtrain
from jaxtrain.run import peers
from jaxtrain.run.peers import refuse_other_runs

WORKER = """
import multiprocess_worker
try:
    multiprocess_worker.main()
except ValueError as error:
    print("refused:", error, flush=True)
"""


@dataclass(frozen=True)
class Corpus:
    """Rows that lie in a folder of each machine."""

    folder: str = "/a"
    vocab: int = 16
    seq: int = 8
    isolate_documents: bool = False

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        raise AssertionError("processes are compared before data is opened")


BLOCK = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
)
EXPERIMENT = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(vocab=16, embed=8, layers=1, period=(BLOCK,)),
    data=Corpus(),
    optimizer=jaxtrain.AdamW(1e-2),
    steps=4,
    batch=BATCH,
)
LOGGED = replace(EXPERIMENT, logging=jaxtrain.Logging(every=3))
MOVED = replace(EXPERIMENT, data=Corpus("/b"))
SEEDED = replace(EXPERIMENT, seed=7)
UNSTORED = replace(EXPERIMENT, optimizer=optax.sgd(1e-2))
OF_FOUR = jaxtrain.mesh_from_axes(data=4)
ONE: dict[str, Any] = dict(
    host="a", count=2, experiment=EXPERIMENT, spec=jaxtrain.mesh_from_axes(data=2), run="x", last=4
)


def messages(
    monkeypatch: pytest.MonkeyPatch, *processes: dict[str, Any], leave_s: float = 0.0
) -> list[str]:
    """What each process is told, "" for nothing. processes: what is not as in ONE. leave_s: how
    long process 0 waits for the others, which must be enough."""
    each = [{**ONE, **process} for process in processes]
    here = threading.local()

    def act(index: int) -> None:
        here.host, here.count = each[index]["host"], each[index]["count"]
        run = None if each[index]["run"] is None else Path(each[index]["run"])
        fields = (each[index][name] for name in ("experiment", "spec"))
        try:
            refuse_other_runs(*fields, run, each[index]["last"])
        finally:
            left.append(index)

    left: list[int] = []
    monkeypatch.setattr(peers, "LEAVE_S", leave_s)
    monkeypatch.setattr(peers, "stated_processes", lambda: here.count)
    monkeypatch.setattr(peers.socket, "gethostname", lambda: here.host)
    errors = play(monkeypatch, len(each), act)
    assert {type(error) for error in errors} <= {ValueError, type(None)}
    assert not leave_s or left[-1] == 0
    return [str(error or "") for error in errors]


OTHERS = {
    "directory": ([{}, dict(run="y")], "run directory"),
    "none": ([{}, dict(run=None)], "kind of run"),
    "none elsewhere": ([{}, dict(host="b", run=None)], "kind of run"),
    "second host": ([{}, dict(host="b"), dict(host="b", run="y")], "run directory"),
    "experiment": ([{}, dict(experiment=SEEDED)], "experiment"),
    "elsewhere": ([{}, dict(host="b", experiment=SEEDED)], "experiment"),
    "processes": ([{}, dict(count=3)], "number of processes"),
    "steps": ([{}, dict(last=3)], "last step"),
    "mesh": ([{}, dict(spec=OF_FOUR)], "mesh"),
    "mesh and steps": ([{}, dict(last=3, spec=OF_FOUR)], "mesh and one last step"),
}


@pytest.mark.parametrize(("processes", "names"), OTHERS.values(), ids=OTHERS)
def test_a_process_of_another_run_is_refused_on_all(processes, names, monkeypatch) -> None:
    said = messages(monkeypatch, *processes)
    assert len({*said}) == 1
    assert f"processes of one run have one {names}; process " in said[0]
    assert f"process {len(processes) - 1} on " in said[0] and "--coordinator" in said[0]
    assert str(Path("x").resolve()) in said[0]


def test_fields_that_differ_are_named(monkeypatch) -> None:
    longer = replace(SEEDED, optimizer=jaxtrain.AdamW(3e-2))
    said = messages(monkeypatch, {}, {}, dict(experiment=longer))
    assert len({*said}) == 1
    assert "process 0 on a has experiment optimizer.learning_rate=0.01 and seed=0, run" in said[0]
    assert "process 2 on a has experiment optimizer.learning_rate=0.03 and seed=7, run" in said[0]


def test_the_process_that_holds_the_service_leaves_last(monkeypatch) -> None:
    """JAX aborts the others as it ends."""
    assert all(messages(monkeypatch, dict(run="y"), *[{}] * 5, leave_s=0.5))


OWN = {
    "the same": [{}, {}, {}],
    "a directory under another path": [{}, dict(host="b", run="y"), dict(host="b", run="y")],
    "what a resumed run may change": [{}, dict(experiment=LOGGED)],
    "data under another path": [{}, dict(experiment=MOVED)],
    "data under a relative path": [{}, dict(experiment=replace(EXPERIMENT, data=Corpus("../b")))],
    "in memory": [dict(run=None), dict(run=None)],
    "not stored": [dict(run=None, experiment=UNSTORED)] * 2,
}


@pytest.mark.parametrize("processes", OWN.values(), ids=OWN)
def test_processes_of_one_run_are_not(processes, monkeypatch) -> None:
    assert {*messages(monkeypatch, *processes)} == {""}


def test_two_runs_at_one_port_write_nothing(tmp_path: Path) -> None:
    said = process_group.run(
        tmp_path,
        2,
        lambda index, port: ["-c", WORKER, 2, index, port, f"run{index}", "out"],
        modules=Path(__file__).parent,
    )
    assert all("refused: processes of one run have one run directory" in text for text in said)
    assert all(str(tmp_path / f"run{n}") in text for n in (0, 1) for text in said)
    assert not [*tmp_path.glob("run*"), *tmp_path.glob("out")]
