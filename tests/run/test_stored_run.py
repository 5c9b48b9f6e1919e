"""A run in an object store goes on on any machine: its directory there has all but the steps."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import process_group
import pytest
from object_store import ObjectStore, object_store, put_object

import jaxtrain
from jaxtrain import cli, violations
from jaxtrain.checkpoint import CheckpointError, DamagedCheckpoint
from jaxtrain.checkpoint.storage import committed_steps
from jaxtrain.cluster.run_lock import sole_run
from jaxtrain.fault_tolerance.faults import Injector
from jaxtrain.files.cache_entries import cache_contents
from jaxtrain.files.pointer import POINTER, StoreFailed, checkpoints_in
from jaxtrain.files.stored_run import RunCopy, opened_for_training
from jaxtrain.run.directory import left_in
from jaxtrain.run.saves import Saves
from jaxtrain.telemetry.metrics import read_metrics
from jaxtrain.weights.loading import load
from jaxtrain.weights.run_step import run_and_step

ADDRESS = "s3://bucket/team/lm"
BELOW = "bucket/team/lm/"


@pytest.fixture
def first(own):
    """An experiment that saves every second step."""
    return replace(own, steps=8, checkpoints=jaxtrain.SavePolicy(every=2))


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[ObjectStore]]:
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    move_to(tmp_path / "a", monkeypatch)
    with object_store() as store:
        yield store


def move_to(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory of another machine, which has the store alone in common."""
    machine.mkdir(exist_ok=True)
    monkeypatch.chdir(machine)


def trained(experiment, steps: int, run: Any = ADDRESS, **more: Any):
    return jaxtrain.train(experiment, "cpu_1", run_dir=run, steps=steps, **more)


def metrics(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_metrics(run)}


def as_numpy(result) -> dict[str, np.ndarray]:
    return {name: np.asarray(leaf) for name, leaf in result.session.state.params.items()}


def test_another_machine_goes_on_to_the_bit_and_then_the_first_one(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[ObjectStore]
) -> None:
    whole = trained(first, 8, run=None)
    trained(first, 3)
    assert {path.name for path in Path("runs/lm").iterdir()} >= {"config.json", POINTER, ".lock"}
    assert not Path("runs/lm/checkpoints").exists()
    for machine, start, steps in (("b", 3, 6), ("a", 6, 8)):
        move_to(tmp_path / machine, monkeypatch)
        result = trained(first, steps)
        assert result.session.start == start
        expected = {line["step"]: line["loss"] for line in whole.history if line["step"] <= steps}
        assert metrics(Path("runs/lm")) == expected
    ours, theirs = as_numpy(result), as_numpy(whole)
    assert all((ours[name] == leaf).all() for name, leaf in theirs.items())
    copied = json.loads(store.files[BELOW + "config.json"])
    assert copied == json.loads(Path("runs/lm/config.json").read_text())
    assert store.files[BELOW + "metrics.jsonl"] == Path("runs/lm/metrics.jsonl").read_bytes()
    hidden = [name for name in store.files if "/." in name or name.endswith(POINTER)]
    assert hidden == [BELOW + ".run"] * (BELOW + ".run" in store.files)


def test_a_machine_that_is_lost_between_two_copies_loses_no_saved_step(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its copy is older than its last save; its own files are newer than the copy."""
    trained(first, 4)
    before = metrics(Path("runs/lm"))
    with monkeypatch.context() as patch:
        patch.setattr(RunCopy, "begin", lambda self: None)
        patch.setattr(RunCopy, "close", lambda self: None)
        trained(first, 6)
    newer = metrics(Path("runs/lm"))
    move_to(tmp_path / "b", monkeypatch)
    with opened_for_training(ADDRESS) as run:
        assert metrics(run) == before
    move_to(tmp_path / "a", monkeypatch)
    with opened_for_training(ADDRESS) as run:
        assert metrics(run) == newer, "what is here is newer"
    assert trained(first, 8).session.start == 6


def test_two_machines_do_not_train_one_run(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one that began first stops saving once the other has made a copy, and says so."""

    class Elsewhere(jaxtrain.Callback):
        def before_step(self, run: Any, step: int) -> None:
            if step == 3:
                put_object(BELOW + "copied.json", json.dumps({"mark": "theirs"}).encode())

    monkeypatch.setattr(RunCopy, "begin", RunCopy.make)
    said = r"step 4 .*another start .*leave this run to the other"
    with pytest.raises(CheckpointError, match=said):
        trained(first, 8, callbacks=[Elsewhere()])
    assert "step 5" not in capsys.readouterr().out, "it ends at once"
    assert committed_steps(checkpoints_in(Path("runs/lm"))) == [2]


def test_a_copy_that_fails_is_told_and_ends_no_run(
    first,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    store: type[ObjectStore],
) -> None:
    """The steps are what counts; the next copy has what this one has not."""
    begin = RunCopy.begin

    def begun_and_ended(copy: RunCopy) -> None:
        begin(copy)
        assert copy._last is not None
        copy._last.exception()

    def refuses(kind: str, name: str) -> None:
        if kind == "write" and name == BELOW + "metrics.jsonl" and name in store.files:
            raise PermissionError("no more metrics")

    monkeypatch.setattr(RunCopy, "begin", begun_and_ended)
    store.request = refuses
    assert trained(first, 6).saved == 6
    told = capsys.readouterr().out
    assert "NOTE the last copy of runs/lm to s3://bucket/team/lm: no more metrics" in told
    assert "NOTE runs/lm is not copied whole to s3://bucket/team/lm: no more metrics" in told
    store.request = lambda kind, name: None
    trained(first, 8)
    assert store.files[BELOW + "metrics.jsonl"] == Path("runs/lm/metrics.jsonl").read_bytes()


def test_a_store_that_cannot_be_written_is_refused_before_the_first_step(
    first, capsys: pytest.CaptureFixture[str], store: type[ObjectStore]
) -> None:
    def refuses(kind: str, name: str) -> None:
        if kind == "write" and name.endswith("config.json"):
            raise PermissionError("read alone")

    store.request = refuses
    with pytest.raises(ValueError, match=r"s3://bucket/team/lm cannot be written: read alone;"):
        trained(first, 2)
    assert "step 1" not in capsys.readouterr().out


def test_a_list_of_runs_asks_no_store(first, store: type[ObjectStore]) -> None:
    trained(first, 3)

    def refuses(kind: str, name: str) -> None:
        raise AssertionError(f"{kind} {name}")

    store.request = refuses
    (listed,) = jaxtrain.runs().runs
    assert (listed.step, listed.state) == (3, "stopped")


def test_a_run_directory_that_is_removed_is_written_again(
    first,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    store: type[ObjectStore],
) -> None:
    monkeypatch.setattr(RunCopy, "begin", lambda self: None)  # nothing is written meanwhile

    class Removes(jaxtrain.Callback):
        def before_step(self, run: Any, step: int) -> None:
            if step == 3:
                shutil.rmtree(Path("runs"))
            if step == 5:
                assert Path("runs/lm", POINTER).exists()

    trained(first, 6, callbacks=[Removes()])
    assert "was removed below the run; it is written again" in capsys.readouterr().out
    assert trained(first, 8).session.start == 6
    assert store.files[BELOW + "config.json"] == Path("runs/lm/config.json").read_bytes()


def test_runs_of_one_name_have_directories_of_their_own(first) -> None:
    trained(first, 2)
    trained(first, 2, run="runs/local")
    for address, name in (("s3://bucket/other/lm", "lm"), ("s3://bucket/local", "local")):
        for steps in (2, 4):
            assert trained(first, steps, run=address).session.start == steps - 2
        (directory,) = Path("runs").glob(f"{name}-*")
        assert len(directory.name) == len(name) + 9
        assert [*metrics(directory)] == [1, 2, 3, 4]
    assert [*metrics(Path("runs/lm"))] == [*metrics(Path("runs/local"))] == [1, 2]


def test_a_run_whose_store_json_is_lost_is_brought_again(first) -> None:
    trained(first, 2)
    Path("runs/lm", POINTER).unlink()
    assert trained(first, 4).session.start == 2
    assert len([*Path("runs").iterdir()]) == 2


def test_a_directory_that_was_here_before_stays(first) -> None:
    Path("runs/lm").mkdir(parents=True)
    Path("runs/lm/notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="--fresh"):
        trained(first, 2, fresh=True)
    assert Path("runs/lm/notes.txt").read_text() == "mine"


def test_the_directory_stands_for_the_address(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has what another machine has done since, too."""
    trained(first, 2)
    move_to(tmp_path / "b", monkeypatch)
    trained(first, 4)
    move_to(tmp_path / "a", monkeypatch)
    assert trained(first, 6, run="runs/lm").session.start == 4
    assert [*metrics(Path("runs/lm"))] == [1, 2, 3, 4, 5, 6]


def test_a_copy_does_not_hide_that_another_one_was_made(
    first, store: type[ObjectStore], tmp_path: Path
) -> None:
    trained(first, 2)
    (Path("runs/lm") / "link").symlink_to(tmp_path)
    copy = RunCopy.of(Path("runs/lm"))
    assert copy is not None
    copy.make()
    assert BELOW + "link" not in store.files, "what is not of the run"
    theirs = json.dumps({"mark": "theirs"}).encode()
    put_object(BELOW + "copied.json", theirs)
    with pytest.raises(ValueError, match="another start of the run has written"):
        copy.make()
    assert store.files[BELOW + "copied.json"] == theirs


def test_a_copy_that_is_cut_short_is_brought_whole_next_time(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[ObjectStore]
) -> None:
    trained(first, 2)
    move_to(tmp_path / "b", monkeypatch)

    def refuses(kind: str, name: str) -> None:
        if kind == "read" and name.endswith("metrics.jsonl"):
            raise PermissionError("no metrics")

    (tmp_path / "b" / "runs" / "lm").mkdir(parents=True)
    store.request = refuses
    with pytest.raises(ValueError, match="cannot be read into runs/lm: no metrics"):
        trained(first, 4)
    assert Path("runs/lm/config.json").exists() and not Path("runs/lm/metrics.jsonl").exists()
    store.request = lambda kind, name: None
    assert trained(first, 4).session.start == 2
    assert [*metrics(Path("runs/lm"))] == [1, 2, 3, 4]


def test_what_is_refused_leaves_nothing_here_or_there(first, store: type[ObjectStore]) -> None:
    with pytest.raises(ValueError, match="is a bucket; give a name"):
        trained(first, 2, run="s3://bucket")
    with pytest.raises(ValueError, match="steps=9"):
        trained(first, 9)
    with pytest.raises(ValueError, match="its steps in s3://bucket/team/lm, and --fresh"):
        trained(first, 2, fresh=True)
    assert not list(Path().iterdir()) and not store.files


def test_another_experiment_is_refused_with_a_way_that_is_open(first) -> None:
    trained(first, 2)
    with pytest.raises(ValueError) as refused:
        trained(replace(first, seed=5), 2)
    ways = "seed was 0, now 5; set it back, or begin anew in another --run-dir; a branch has"
    assert ways in str(refused.value)
    assert str(refused.value).endswith(f"--from {ADDRESS}[@STEP] --run-dir NEW")


def test_an_address_is_read_where_a_run_is(
    first,
    decoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = replace(decoder, steps=8, checkpoints=first.checkpoints)
    result = trained(first, 4)
    move_to(tmp_path / "b", monkeypatch)
    assert [verdict.step for verdict in jaxtrain.verify(ADDRESS) if verdict.usable] == [2, 4]
    put_object(BELOW + "checkpoints/6/state/half", b"")
    capsys.readouterr()
    assert cli.main(["verify", ADDRESS]) == 0
    assert "step 6: not committed; it is being saved, or was cut short" in capsys.readouterr().out
    params = load(f"{ADDRESS}@4").params
    assert all((np.asarray(params[name]) == leaf).all() for name, leaf in as_numpy(result).items())
    tuned = jaxtrain.FineTuning(start=jaxtrain.FromRun(ADDRESS, step=4))
    begun = trained(replace(first, fine_tuning=tuned), 1, run="runs/tuned")
    assert begun.session.begins.step == 4
    branch = trained(replace(first, seed=0), 6, run="runs/branch", from_run=f"{ADDRESS}@4")
    assert branch.session.start == 4
    recorded = json.loads(Path("runs/branch/config.json").read_text())["branch"]
    assert recorded["run"] == ADDRESS
    shutil.rmtree("runs/branch/checkpoints")  # it goes on from its beginning, on any machine
    shutil.rmtree(tmp_path / "cache")
    again = trained(replace(first, seed=0), 6, run="runs/branch", from_run=f"{ADDRESS}@4")
    assert again.session.start == 4
    assert not Path("runs/lm").exists()


PROCESS = """
import json, os, sys
from pathlib import Path
import jax
from object_store import object_store
store, count, index, port, address, steps = sys.argv[1:]
machine = f"{address.rpartition('/')[2]}{index}of{count}"
os.makedirs(machine); os.chdir(machine)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4 // int(count))
if count != "1":
    jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
import jaxtrain
block = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
)
experiment = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(vocab=16, embed=8, layers=1, period=(block,)),
    data=jaxtrain.data.BigramChain(vocab=16, seq=8),
    optimizer=jaxtrain.AdamW(1e-2), steps=6, batch=8,
    checkpoints=jaxtrain.SavePolicy(every=2),
    logging=jaxtrain.Logging(every=1, tensorboard=False),
)
mesh = jaxtrain.mesh_from_axes(data=2, fsdp=2)
with object_store(Path(store)):
    result = jaxtrain.train(experiment, mesh, run_dir=address, steps=int(steps))
told = [result.session.start, *[line["loss"] for line in result.history]]
print("LOSSES", json.dumps(told))
"""


def losses_of(folder: Path, count: int, address: str, steps: int) -> list[list[float]]:
    """Returns for each process the step that it began after, and its losses. They have the store in
    common, and no other directory."""
    store = folder / "store"
    store.mkdir(exist_ok=True)
    arguments = lambda index, port: ["-c", PROCESS, store, count, index, port, address, steps]  # noqa: E731
    said = process_group.run(folder, count, arguments, modules=Path(process_group.__file__).parent)
    lines = [line for text in said for line in text.splitlines() if line.startswith("LOSSES ")]
    return [json.loads(line.removeprefix("LOSSES ")) for line in lines]


@pytest.mark.slow
def test_processes_need_no_directory_in_common(tmp_path: Path) -> None:
    """Two on machines of their own, then one on a third, are one run."""
    (whole,) = losses_of(tmp_path, 1, "s3://bucket/whole", 6)
    first, second = losses_of(tmp_path, 2, "s3://bucket/run", 4)
    assert first == second and first[1:] == pytest.approx(whole[1:5], rel=1e-6)
    (last,) = losses_of(tmp_path, 1, "s3://bucket/run", 6)
    assert last[0] == 4 and last[1:] == pytest.approx(whole[5:], rel=1e-6)
    metrics_here = tmp_path / "run0of1" / "runs" / "run" / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics_here.read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6]


def test_a_store_that_does_not_answer_once_is_not_damage(
    first, capsys: pytest.CaptureFixture[str], store: type[ObjectStore]
) -> None:
    """No step is passed over for it: the start fails, and the next one goes on."""
    trained(first, 4)
    for file in ("manifest.json", ".pack"):

        def refuses(kind: str, name: str, file: str = file) -> None:
            if kind == "read" and "/4/" in name and name.endswith(file):
                raise OSError("503 slow down")

        store.request = refuses
        with pytest.raises(CheckpointError, match=r"could not be read: OSError: 503 slow down"):
            trained(first, 6)
        with pytest.raises(CheckpointError, match=r"could not be read: OSError: 503 slow down"):
            jaxtrain.verify(ADDRESS)
    assert "DAMAGED" not in capsys.readouterr().out
    store.request = lambda kind, name: None
    assert trained(first, 6).session.start == 4


@pytest.mark.parametrize("takes_effect", [True, False])
def test_a_mark_that_was_not_written_is_not_another_machines(
    first, store: type[ObjectStore], takes_effect: bool
) -> None:
    def refuses(kind: str, name: str) -> None:
        if kind == "write" and name == BELOW + "copied.json" and name in store.files:
            if takes_effect:
                put_object(name, json.dumps({"mark": marks[-1]}).encode())
            raise PermissionError("no mark")

    marks = list[str]()
    token = secrets.token_hex
    begin = RunCopy.begin

    def begun_and_ended(copy: RunCopy) -> None:
        begin(copy)
        assert copy._last is not None
        copy._last.exception()

    store.request = refuses
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunCopy, "begin", begun_and_ended)
        patch.setattr(secrets, "token_hex", lambda size: marks.append(token(size)) or marks[-1])
        assert trained(first, 6).saved == 6
    store.request = lambda kind, name: None
    assert trained(first, 8).session.start == 6


def test_a_run_that_fails_on_a_new_machine_loses_no_line(
    first, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[ObjectStore]
) -> None:
    class Fails(jaxtrain.Callback):
        def before_step(self, run: Any, step: int) -> None:
            raise RuntimeError("lost")

    trained(first, 4)
    move_to(tmp_path / "b", monkeypatch)
    with pytest.raises(RuntimeError, match="lost"):
        trained(first, 8, callbacks=[Fails()])
    trained(first, 8)
    assert [*metrics(Path("runs/lm"))] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert store.files[BELOW + "metrics.jsonl"] == Path("runs/lm/metrics.jsonl").read_bytes()


def test_a_store_that_does_not_answer_at_the_start_is_no_refusal(
    first, store: type[ObjectStore]
) -> None:
    """Who starts runs again does so after it; not for want of permission."""
    for error, refused in ((OSError, False), (PermissionError, True)):
        for kind in ("info", "write"):
            file = BELOW + {"info": "copied.json", "write": "config.json"}[kind]

            def refuses(
                called: str, name: str, kind: str = kind, file: str = file, error: Any = error
            ) -> None:
                if (called, name) == (kind, file):
                    raise error("503 slow down")

            store.request = refuses
            with pytest.raises(ValueError, match=r"s3://bucket/team/lm cannot be .*503") as raised:
                trained(first, 2)
            assert violations.refuses(raised.value) is refused
            assert not Path("runs/lm/metrics.jsonl").exists()
            store.request = lambda kind, name: None


def test_a_local_tier_goes_on_beside_a_store(
    first,
    tmp_path: Path,
    store: type[ObjectStore],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its saves ask the store nothing; a start that cannot ask the store whose tier it is fails."""
    tier = jaxtrain.checkpoint.LocalTier(every=1, directory=str(tmp_path / "tier"))
    tiered = replace(first, checkpoints=jaxtrain.SavePolicy(every=4, local=tier))

    class Dies(jaxtrain.Callback):
        def before_step(self, run: Any, step: int) -> None:
            if step == 2:
                store.request = refuses
            if step == 4:
                store.request = lambda kind, name: None
            if step == 6:
                raise KeyboardInterrupt

    def refuses(kind: str, name: str) -> None:
        raise OSError("503 slow down")

    monkeypatch.setattr(Saves, "leave", lambda self, word: None)  # as if it were killed
    with pytest.raises(KeyboardInterrupt):
        trained(tiered, 8, callbacks=[Dies()])
    assert "NOT SAVED" not in capsys.readouterr().out

    def no_name(kind: str, name: str) -> None:
        if name == BELOW + ".run":
            raise OSError("503 slow down")

    store.request = no_name
    with pytest.raises(OSError, match="503 slow down"):
        trained(tiered, 8)
    store.request = lambda kind, name: None
    assert trained(tiered, 8).session.start == 5


def test_weights_that_a_store_does_not_give_are_not_damaged(
    first, decoder, store: type[ObjectStore]
) -> None:
    trained(replace(decoder, steps=8, checkpoints=first.checkpoints), 2)
    tuned = jaxtrain.FineTuning(start=jaxtrain.FromRun(ADDRESS))

    def refuses(kind: str, name: str) -> None:
        if kind == "read" and name.endswith(".pack"):
            raise OSError("503 slow down")

    store.request = refuses
    with pytest.raises(
        CheckpointError, match="could not be read: OSError: 503 slow down"
    ) as raised:
        trained(replace(decoder, steps=8, fine_tuning=tuned), 1, run="runs/tuned")
    assert not isinstance(raised.value, DamagedCheckpoint)


def test_a_copy_of_which_this_machine_never_heard_the_end_is_its_own(
    first, store: type[ObjectStore]
) -> None:
    """Killed between the store's mark and its own: what is here is as new as the copy, or newer."""
    trained(first, 2)
    pointer = json.loads(Path("runs/lm", POINTER).read_text())
    unheard = {**pointer, "mark": "old", "pending": pointer["mark"]}
    Path("runs/lm", POINTER).write_text(json.dumps(unheard))
    put_object(BELOW + "metrics.jsonl", b"older")
    trained(first, 4)
    assert [*metrics(Path("runs/lm"))] == [1, 2, 3, 4]


def test_a_local_run_that_fails_keeps_its_directory(first) -> None:
    class Fails(jaxtrain.Callback):
        def before_step(self, run: Any, step: int) -> None:
            if step == 4:
                Path("runs/local/.lock").unlink()
                raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        trained(first, 8, run="runs/local", callbacks=[Fails()])
    assert Path("runs/local/checkpoints/2").is_dir()


def test_what_another_tool_has_copied_is_read_as_it_is_now(store: type[ObjectStore]) -> None:
    """It leaves no mark. A first try that fails is repeated."""

    reads = []

    def refuses(kind: str, name: str) -> None:
        if kind == "read" and name.endswith("config.json"):
            reads.append(name)
            if len(reads) in (1, 3):  # at the first look, and at the copy after the second one
                raise OSError("503 slow down")

    store.request = refuses
    for _ in range(2):
        put_object(BELOW + "config.json", b'{"experiment": {}}')
        with pytest.raises(ValueError, match="503 slow down"):
            run_and_step(ADDRESS)
    for version in (1, 2):
        config = {"experiment": {}, "version": version}
        put_object(BELOW + "config.json", json.dumps(config).encode())
        here = run_and_step(ADDRESS)[0]
        assert json.loads((here / "config.json").read_text())["version"] == version
    entries = {entry.path: entry.about for entry in cache_contents().entries}
    assert entries[here] == ADDRESS and len(entries) == 2
    put_object(BELOW + "config.json", b"{")
    with pytest.raises(ValueError, match=f"{ADDRESS}/config.json is not JSON"):
        run_and_step(ADDRESS)
    put_object(BELOW + "copied.json", b'{"mark": "a"}')
    assert (run_and_step(ADDRESS)[0] / "config.json").read_bytes() == b"{"
    with pytest.raises(ValueError, match=r"s3://bucket/none has no config.json"):
        run_and_step("s3://bucket/none")


def test_a_branch_with_saves_of_its_own_needs_the_other_run_no_more(
    first, store: type[ObjectStore], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(first, 4)
    trained(first, 6, run="runs/branch", from_run=f"{ADDRESS}@4")
    assert "branch of step 4 of s3://bucket/team/lm" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "cache")
    store.files.clear()
    assert trained(first, 8, run="runs/branch").session.start == 6


def test_a_start_that_is_refused_changes_nothing_of_the_run_that_goes_on(
    first, store: type[ObjectStore]
) -> None:
    trained(first, 2)
    put_object(BELOW + "metrics.jsonl", b"theirs")
    put_object(BELOW + "copied.json", json.dumps({"mark": "theirs"}).encode())
    before = Path("runs/lm/metrics.jsonl").read_bytes()
    with sole_run(Path("runs/lm")), pytest.raises(ValueError, match="is in use by process"):
        trained(first, 4)
    assert Path("runs/lm/metrics.jsonl").read_bytes() == before


def test_a_run_says_where_it_is_kept(
    first, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(first, 2)
    told = "the run is kept in s3://bucket/team/lm; runs/lm has its files but the steps"
    assert told in capsys.readouterr().out
    assert left_in(Path("runs/lm"))[1].startswith(
        "step 2 is saved in s3://bucket/team/lm (here runs/lm);"
    )


@pytest.mark.parametrize(
    "address",
    ["s3://", "s3:///a", "s3://bucket//a", "s3://bucket/../a", "s3://bucket/a/.", "s3://.."],
)
def test_an_address_that_names_no_place_is_refused(first, address: str) -> None:
    with pytest.raises(ValueError, match="is no address; give one such as s3://BUCKET/NAME"):
        trained(first, 2, run=address)


def test_a_faults_damage_is_of_the_stores_step(first, store: type[ObjectStore]) -> None:
    trained(first, 4)
    for kind in ("corrupt", "truncate", "foreign"):
        before = dict(store.files)
        injector = Injector(json.dumps(["faults"]), 0, Path("runs/lm"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("jaxtrain.fault_tolerance.faults._signal", lambda number: None)
            injector._damage(kind)
        changed = {name for name, data in store.files.items() if before[name] != data}
        assert len(changed) == 1 and all("/checkpoints/4/" in name for name in changed)
        store.files.clear()
        store.files.update(before)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_a_run_that_makes_a_copy_is_read_again(copies: int, store: type[ObjectStore]) -> None:
    """As often as three times; then the reader is told."""
    config = {"experiment": {}, "copy": 0}
    put_object(BELOW + "config.json", json.dumps(config).encode())
    put_object(BELOW + "copied.json", b'{"mark": "a"}')
    put_object(BELOW + "notes/a.txt", b"12345")

    def copied(kind: str, name: str) -> None:
        if kind == "read" and name.endswith("config.json") and config["copy"] < copies:
            config["copy"] += 1
            put_object(name, json.dumps(config).encode())

    store.request = copied
    if copies == 3:
        with pytest.raises(StoreFailed, match="has been written again while it was read"):
            run_and_step(ADDRESS)
        return
    here = run_and_step(ADDRESS)[0]
    assert json.loads((here / "config.json").read_text())["copy"] == copies
    (entry,) = cache_contents().entries
    names = ("config.json", "store.json", "notes/a.txt")
    assert entry.bytes == sum((here / name).stat().st_size for name in names)


def test_a_fetch_that_fails_leaves_the_file_as_it_was(
    first, store: type[ObjectStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(first, 2)
    before = Path("runs/lm/metrics.jsonl").read_bytes()
    put_object(BELOW + "metrics.jsonl", b"theirs, and longer")
    put_object(BELOW + "copied.json", json.dumps({"mark": "theirs"}).encode())
    reads = []

    def refuses(kind: str, name: str) -> None:
        if kind == "read" and name.endswith("metrics.jsonl"):
            reads.append(name)
            if len(reads) == 2:
                raise OSError("503 slow down")

    monkeypatch.setattr("jaxtrain.files.objects.PIECE", 8)
    store.request = refuses
    with pytest.raises(ValueError, match="503 slow down"):
        trained(first, 4)
    assert len(reads) >= 2 and Path("runs/lm/metrics.jsonl").read_bytes() == before


def test_a_step_is_named_behind_an_address(store: type[ObjectStore]) -> None:
    put_object(BELOW + "config.json", b"{}")
    put_object("bucket/a@b/config.json", b"{}")
    for text, step in ((f"{ADDRESS}@12", 12), (ADDRESS, None), ("s3://bucket/a@b", None)):
        path, number = run_and_step(text)
        assert number == step and (path / "config.json").read_text() == "{}"


def test_no_file_of_a_store_is_written_beside_the_run(store: type[ObjectStore]) -> None:
    for name in ("../out", "a/../../out", ".lock", "launch-1/x", "checkpoints/1/x", "a\\b", "good"):
        put_object(BELOW + name, b"theirs")
    with opened_for_training(ADDRESS) as run:
        names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
        assert names == ["good", POINTER]
    assert [path.name for path in Path("runs").iterdir()] == ["lm"]
