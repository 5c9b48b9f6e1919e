"""Progress lines and the bar, with a clock of the test's own."""

from __future__ import annotations

import errno
import io
import re
import time

import pytest

from jaxtrain.telemetry.progress import Progress, compact, duration


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, steps: range, total: int, every: int, step_s: float = 2.0) -> None:
    """A first step of 100 s (it compiles), then `step_s` each."""
    now = iter([100.0 + step_s * i for i in range(len(steps))])
    with Progress(total, steps.start - 1, stream, every, clock=lambda: next(now)) as progress:
        for step in steps:
            progress.update(
                step, {"loss": 3.41215, "tokens_per_s": 81234.0, "mfu_full": 0.432, "seed": 1}
            )


class Gone(Terminal):
    """A terminal that was closed after some writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.left = writes

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_a_closed_stream_no_longer_takes_is_dropped(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gone, "isatty", lambda _: terminal)
    stream = Gone(writes=2)
    run(stream, range(1, 26), total=25, every=10)
    with Progress(25, 0, stream) as progress:
        progress.message("nobody reads this")
    assert stream.left < 0 < len(stream.getvalue())


def lines_of(stream: io.StringIO) -> list[str]:
    """Without the time of day, which each has."""
    lines = stream.getvalue().splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)
    return [line[9:] for line in lines]


def test_each_line_has_the_time() -> None:
    stream = io.StringIO()
    noon = time.mktime((2026, 5, 1, 12, 3, 4, 0, 0, -1))
    progress = Progress(2, stream=stream, every=1, clock=lambda: 0.0, wall=lambda: noon)
    progress.update(1, {"loss": 1.0})
    progress.message("two\nlines")
    assert stream.getvalue() == "12:03:04 step 1/2 loss 1.000\n12:03:04 two\nlines\n"


def test_plain_lines() -> None:
    stream = io.StringIO()
    run(stream, range(1, 26), total=25, every=10)
    assert lines_of(stream) == [
        "step 1/25 loss 3.412 tok/s 81k mfu 0.43",
        "step 10/25 loss 3.412 tok/s 81k mfu 0.43 eta 30s",
        "step 20/25 loss 3.412 tok/s 81k mfu 0.43 eta 10s",
        "step 25/25 loss 3.412 tok/s 81k mfu 0.43 eta 0s",
    ]


def test_a_resumed_run_knows_only_its_own_pace() -> None:
    stream = io.StringIO()
    run(stream, range(501, 511), total=600, every=10, step_s=1.0)
    last = lines_of(stream)[-1]
    assert last == "step 510/600 loss 3.412 tok/s 81k mfu 0.43 eta 1m30s"


def test_values_that_are_missing_or_not_finite() -> None:
    stream = io.StringIO()
    progress = Progress(2, stream=stream, every=1, clock=lambda: 0.0)
    progress.update(1, {"loss": float("nan"), "mfu_full": None})
    progress.update(2, {})
    progress.message("evaluated: loss 3.1")
    progress.close()
    assert lines_of(stream) == ["step 1/2 loss nan", "step 2/2 eta 0s", "evaluated: loss 3.1"]


def test_skipped_steps_are_told_when_there_are_more() -> None:
    stream = io.StringIO()
    progress = Progress(5, stream=stream, every=2, clock=lambda: 0.0)
    for step, skipped in enumerate([0.0, 1.0, 2.0, 2.0, 2.0], start=1):
        progress.update(step, {"loss": 3.0, "skipped": skipped})
    assert [line.split(" eta")[0] for line in lines_of(stream)] == [
        "step 1/5 loss 3.000",
        "step 2/5 loss 3.000 skipped 1",
        "step 4/5 loss 3.000 skipped 2",
        "step 5/5 loss 3.000",
    ]


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = Progress(600, stream=stream, every=10)
    for step in range(1, 601):
        progress.update(step, {"loss": 3.41215})
    progress.message("saved [step] 600")
    progress.close()
    progress.close()
    drawn = stream.getvalue()
    assert "600/600" in drawn and "loss 3.412" in drawn and "eta 0s" in drawn
    assert "saved [step] 600" in drawn
    assert drawn.count("3.412") < 100, "the bar is redrawn at most ten times a second"
    assert drawn.count("\x1b[?25l") == drawn.count("\x1b[?25h") == 1, "the cursor comes back"


def test_a_terminal_that_cannot_draw_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    run(stream, range(1, 4), total=3, every=1)
    assert stream.getvalue().count("\n") == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (80, "1m20s"),
        (3599.6, "1h00m"),
        (7500, "2h05m"),
        (280800, "3d06h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (950.2, "950"), (999.6, "1.0k"), (8123, "8.1k"), (81234, "81k"), (9.99e5, "999k"),
     (1.2e6, "1.2M"), (3.4e12, "3400G")],
)  # fmt: skip
def test_compact(number: float, text: str) -> None:
    assert compact(number) == text


def test_every_must_be_positive() -> None:
    with pytest.raises(ValueError, match="every=0"):
        Progress(10, every=0)
