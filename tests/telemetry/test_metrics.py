"""The laws of metrics.jsonl: strict JSON, each step once, nothing lost but what was abandoned."""

from __future__ import annotations

import io
import json
import math
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.files import appended
from jaxtrain.files.appended import AppendedFile
from jaxtrain.telemetry.events import _record
from jaxtrain.telemetry.metrics import DelayedMetrics, MetricsWriter, read_metrics


def write(run_dir: Path, steps: range, start: int = 0, scale: float = 1.0) -> str:
    with MetricsWriter(run_dir, start=start, tensorboard=False) as writer:
        for step in steps:
            writer.write(step, {"loss": step * scale})
    return writer.lacks


def strict(path: Path) -> list[dict]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = path.read_text().splitlines()
    return [without_time(json.loads(line, parse_constant=refuse)) for line in lines]


def without_time(line: dict) -> dict:
    """Which each line has."""
    assert datetime.fromisoformat(line["time"]).tzinfo == UTC
    return {name: value for name, value in line.items() if name != "time"}


def test_each_line_says_when_it_was_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, tensorboard=False, wall=lambda: 1_800_000_000.4) as writer:
        writer.write(0, {"loss": 1.0})
        writer.write(1, {"time": 3})  # a metric of that name is kept
    times = [line["time"] for line in read_metrics(tmp_path)]
    assert times == ["2027-01-15T08:00:00+00:00", 3]


@pytest.mark.parametrize("resumed", [0, 3, 7, 10, 12])
def test_a_resumed_run_reads_like_one_that_never_stopped(tmp_path: Path, resumed: int) -> None:
    write(tmp_path, range(10), scale=-1)
    write(tmp_path, range(resumed, 15), start=resumed)
    found = read_metrics(tmp_path)
    assert [line["step"] for line in found] == [*range(min(resumed, 10)), *range(resumed, 15)]
    assert all(
        line["loss"] == line["step"] * (-1 if line["step"] < resumed else 1) for line in found
    )


def test_every_cut_of_the_last_line_is_repaired(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, range(5))
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole) + 1):
        path.write_bytes(whole[:cut])
        # The object is whole once its brace is there, with or without the end of the line.
        kept = 5 if cut >= len(whole) - 1 else 4
        assert [line["step"] for line in read_metrics(tmp_path)] == list(range(kept))
        lacks = write(tmp_path, range(kept, 6), start=kept)
        cut_off = f"the last line of {path} was cut off; it is dropped"
        assert lacks == (cut_off if last < cut < len(whole) - 1 else "")
        assert path.read_bytes().startswith(whole if kept == 5 else whole[:last])
        assert [line["step"] for line in strict(path)] == list(range(6))


def test_a_file_without_the_steps_before_is_told(tmp_path: Path) -> None:
    """As one that was emptied; not that of a run which begins."""
    path = tmp_path / "metrics.jsonl"
    assert write(tmp_path, range(1, 3), start=1) == ""
    assert write(tmp_path, range(1, 3), start=1) == "", "begun again, without a save"
    path.write_bytes(b"")
    assert write(tmp_path, range(5, 6), start=5) == f"{path} has no line of the steps before 5"


def test_damage_before_the_last_line_is_not_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, range(4))
    damaged = path.read_text().replace('{"step": 1', "{\x00step: 1")
    path.write_text(damaged)
    for attempt in (lambda: read_metrics(tmp_path), lambda: MetricsWriter(tmp_path, start=2)):
        with pytest.raises(ValueError, match=r"metrics\.jsonl:2 .* remove that line"):
            attempt()
    assert path.read_text() == damaged


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.5, 3, True, None, "skipped"])
def test_values_come_back_through_strict_json(tmp_path: Path, value: object) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"loss": value})
    [line] = strict(tmp_path / "metrics.jsonl")
    if isinstance(value, float) and not math.isfinite(value):
        assert line == {"step": 0, "loss": None, "loss_nonfinite": str(value)}
    [found] = read_metrics(tmp_path)
    assert list(found) == ["step", "time", "loss"]
    assert repr(found["loss"]) == repr(value)


@pytest.mark.parametrize(
    ("array", "value"),
    [
        (np.float32(0.5), 0.5),
        (jnp.float32(0.5), 0.5),
        (jnp.bfloat16(0.5), 0.5),
        (jnp.int32(7), 7),
        (jnp.bool_(True), True),
    ],
)
def test_arrays_of_any_type_are_scalars(tmp_path: Path, array: object, value: object) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"x": array})
    assert strict(tmp_path / "metrics.jsonl") == [{"step": 0, "x": value}]


@pytest.mark.parametrize(
    ("step", "values", "message"),
    [
        (3, {"loss": 1.0}, "step 3 comes after step 3"),
        (2, {"loss": 1.0}, "step 2 comes after step 3"),
        (4, {"load": np.ones(8)}, r"shape \(8,\).*load_0"),
        (4, {"load": object()}, "of type object"),
        (4, {"step": 4}, "call it another"),
        (4, {"own": [1.0, math.nan]}, "'own' is a list of .* finite numbers alone"),
        (4, {"own": [1.0, "a"]}, "finite numbers alone"),
    ],
)
def test_what_is_refused_leaves_the_file_as_it_was(
    tmp_path: Path, step: int, values: dict, message: str
) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(3, {"loss": 1.0})
        with pytest.raises(ValueError, match=message):
            writer.write(step, values)
        writer.write(5, {"loss": 2.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [3, 5]


def test_a_line_is_readable_at_once_and_only_process_0_writes(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    writer = MetricsWriter(tmp_path, tensorboard=False)
    with MetricsWriter(tmp_path / "other", process=1) as other:
        other.write(0, {"loss": 1.0})
    assert not (tmp_path / "other").exists()
    writer.write(0, {"loss": 1.0})
    assert [without_time(line) for line in read_metrics(tmp_path)] == [{"step": 0, "loss": 1.0}]
    writer.close()
    writer.close()


class FullDisk(io.FileIO):
    """Takes half of what is written, as a disk does that has little room left."""

    def write(self, data: bytes) -> int:
        return super().write(data[: len(data) // 2])


def fill_disk(file: AppendedFile) -> None:
    """From now on the file's disk has little room."""
    file._file.close()
    file._file = FullDisk(file.path, "ab")


@contextmanager
def full_disk(file: AppendedFile) -> Iterator[None]:
    """While it lasts the file's disk has little room."""
    free, file._file = file._file, FullDisk(file.path, "ab")
    yield
    file._file.close()
    file._file = free


def test_a_full_disk_names_the_file_and_leaves_it_whole_and_lines_wait_for_room(
    tmp_path: Path,
) -> None:
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(0, {"loss": 1.0})
        assert writer._file is not None
        with (
            full_disk(writer._file),
            pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"),
        ):
            writer.write(1, {"loss": 2.0})
        assert strict(tmp_path / "metrics.jsonl") == [{"step": 0, "loss": 1.0}]
        writer.write(2, {"loss": 3.0})
        lines = [{"step": step, "loss": 1.0 + step} for step in range(4)]
        assert strict(tmp_path / "metrics.jsonl") == lines[:3]
        with full_disk(writer._file), pytest.raises(OSError, match="No space left"):
            writer.write(3, {"loss": 4.0})
    assert strict(tmp_path / "metrics.jsonl") == lines, "as it is closed at last"


def test_lines_that_wait_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appended, "LARGEST_BACKLOG", 150)
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        assert writer._file is not None
        with full_disk(writer._file):
            for step in range(9):
                with pytest.raises(OSError):
                    writer.write(step, {"loss": 1.0})
    assert [line["step"] for line in strict(tmp_path / "metrics.jsonl")] == [0, 1]


def test_metrics_without_room_at_the_end_are_told_and_both_files_are_closed(
    tmp_path: Path,
) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"loss": 0.0})
    file = writer._file
    assert file is not None
    fill_disk(file)
    with pytest.raises(OSError):
        writer.write(1, {"loss": 1.0})
    with pytest.raises(OSError, match=r"No space left.*metrics\.jsonl"):
        writer.close()
    assert file._file.closed
    assert scalars(tmp_path / "events") == [(0, "loss", 0.0)]


def scalars(events: Path) -> list[tuple[int, str, float]]:
    """Read event files as TensorBoard does: records of length, crc, data, crc."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: list[tuple[int, str, float]] = []
    for path in sorted(events.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.session_log.status == SessionLog.START:
                found = [each for each in found if each[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_tensorboard_events_follow_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for start, factor in ((0, -1.0), (2, 1.0)):
        with MetricsWriter(tmp_path, start=start) as writer:
            for step in range(start, 4):
                values = {"loss": step * factor, "note": "text", "bad": math.nan}
                writer.write(step, {**values, "each": [1.0, 2.0]})
    assert {tag for _, tag, _ in scalars(tmp_path / "events")} == {"loss"}
    assert all(line["each"] == [1.0, 2.0] for line in read_metrics(tmp_path))
    losses = [(step, value) for step, tag, value in scalars(tmp_path / "events") if tag == "loss"]
    assert losses == [(line["step"], line["loss"]) for line in read_metrics(tmp_path)]
    assert losses == [(0, 0.0), (1, -1.0), (2, 2.0), (3, 3.0)]
    assert not caplog.records, "no warning for a number that is not finite"


def test_nothing_of_tensorboard_happens_before_the_first_write(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path):
        assert not (tmp_path / "events").exists()


def test_a_missing_tensorboard_is_said_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="tensorboard=False"):
        MetricsWriter(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    MetricsWriter(tmp_path / "run", tensorboard=False).close()


def test_an_event_that_cannot_be_written_is_not_lost_in_its_thread(tmp_path: Path) -> None:
    (tmp_path / "events").write_text("a file where the folder should be")
    with pytest.raises(OSError), MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": 1.0})
    assert [without_time(line) for line in read_metrics(tmp_path)] == [{"step": 0, "loss": 1.0}]


def test_metrics_come_one_step_late() -> None:
    delayed = DelayedMetrics()
    assert delayed.flush() is None
    step = jax.jit(lambda i: {"loss": i * 2.0, "skipped": i > 2})
    found = [delayed.push(i, step(jnp.float32(i))) for i in range(1, 5)]
    assert found[0] is None
    assert [*found[1:], delayed.flush()] == [
        (i, {"loss": i * 2.0, "skipped": i > 2}) for i in range(1, 5)
    ]
    assert delayed.flush() is None


def test_push_reads_no_step_but_the_one_before() -> None:
    class Watched:
        def __init__(self) -> None:
            self.started = self.read = False

        def copy_to_host_async(self) -> None:
            self.started = True

        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            self.read = True
            return np.asarray(1.0)

    first, second = Watched(), Watched()
    delayed = DelayedMetrics()
    delayed.push(0, {"loss": first})
    assert first.started and not first.read
    delayed.push(1, {"loss": second})
    assert first.read and not second.read


def test_the_heavy_library_is_not_imported_with_the_module() -> None:
    source = Path(sys.modules["jaxtrain.telemetry.events"].__file__).read_text()
    assert not any(line.startswith(("import tensorboardX", "from tensorboardX"))
                   for line in source.splitlines())  # fmt: skip


def test_events_wait_for_room_on_a_full_disk_and_end(tmp_path: Path) -> None:
    """The library's own thread would have ended, and its queue been full for ever."""
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"loss": 0.0})
        events = writer._events
        assert events is not None and events._thread is not None
        events._thread.submit(lambda: None).result()  # all before is written
        (path,) = (tmp_path / "events").iterdir()
        failed = 0
        assert events._file is not None
        with full_disk(events._file):
            for step in range(1, 30):
                try:
                    writer.write(step, {"loss": float(step)})
                except OSError as error:
                    failed += 1
                    assert error.filename == str(path)
                events._thread.submit(lambda: None).result()
        assert failed == 28, "told with the next"
    assert scalars(tmp_path / "events") == [(step, "loss", float(step)) for step in range(30)]


def test_events_that_found_no_room_to_the_end_are_told(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"loss": 0.0})
    events = writer._events
    assert events is not None and events._thread is not None
    events._thread.submit(lambda: None).result()
    file = events._file
    assert file is not None
    fill_disk(file)
    writer.write(1, {"loss": 1.0})
    with pytest.raises(OSError, match="events"):
        writer.close()
    writer.close()
    assert scalars(tmp_path / "events") == [(0, "loss", 0.0)]


def test_records_are_framed_as_the_library_frames_them(tmp_path: Path) -> None:
    from tensorboardX.record_writer import RecordWriter

    for data in (b"", b"a", bytes(range(256)) * 9):
        theirs = RecordWriter(str(tmp_path / "record"))
        theirs.write(data)
        theirs.close()
        assert (tmp_path / "record").read_bytes() == _record(data)
