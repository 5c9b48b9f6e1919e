"""Schedules as files, as grids and as charts."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from rich.console import Console

from jaxtrain import cli
from jaxtrain.pipeline.picture import DrawnSchedule, as_json, figures, grid, schedule, svg
from jaxtrain.pipeline.schedule import Costs, make_schedule
from jaxtrain.pipeline.table_file import read_schedule, written

SIZES = [("gpipe", 2, 3, 1), ("one_f_one_b", 4, 8, 1), ("interleaved", 3, 6, 2)]
SIZES += [("zero_bubble", 2, 5, 1), ("zero_bubble", 2, 4, 3)]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_is_written_is_read_back(size, tmp_path) -> None:
    made = make_schedule(*size)
    path = tmp_path / "mine.csv"
    path.write_text(written(made))
    found = read_schedule(path)
    assert (found.kind, found.stages, found.microbatches, found.chunks) == ("mine", *size[1:])
    assert found.tables.keys() == made.tables.keys()
    for name, table in made.tables.items():
        np.testing.assert_array_equal(found.tables[name], table)


def test_a_table_by_hand_with_comments(tmp_path) -> None:
    path = tmp_path / "lazy.csv"
    path.write_text("# mine\n\nF0,\nF1, F0 B0\nF2 B0, F1 B1\nB1, F2 B2\nB2,\n")
    found = read_schedule(path)
    wanted = make_schedule("one_f_one_b", 2, 3)
    np.testing.assert_array_equal(found.forward, wanted.forward)
    np.testing.assert_array_equal(found.backward, wanted.backward)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ("no tick",)),
        ("F0,\nB0\n", ("line 2 has 1 cells, and the table 2 stages",)),
        ("F0,\n,F0 B0,\nB0,\n", ("bad.csv: line 2 has 3 cells, and the table 2 stages",)),
        ("F0\n,F0\n,,Q\n,B0\nB0\n", ("line 1 has 1 cells, and the table 3 stages", "line 3: 'Q'")),
        ("F0 Q\nB0 F1.x\n", ("line 1: 'Q'", "line 2: 'F1.x'")),
        ("F0 F1\nB0\nB1\n", ("twice in a tick",)),
        ("F0\nF1\nB0\n", ("B on stage 0: microbatch 1, chunk 0 runs 0 times",)),
        ("F0, F0\n, B0\nB0,\n", ("its input comes from the stage before: not before tick 1",)),
    ],
)
def test_what_cannot_be_followed_is_refused_with_every_reason(text, words, tmp_path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read_schedule(path)
    assert str(path) in str(error.value)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_chart_has_a_box_for_every_work_as_long_as_it_costs(size) -> None:
    made = make_schedule(*size)
    costs = Costs(forward=1.0, backward=1.5, weight=0.5)
    tree = ET.fromstring(svg(made, costs))
    space = "{http://www.w3.org/2000/svg}"
    boxes = tree.findall(f"{space}g/{space}rect")
    assert len(boxes) == sum(int((table >= 0).sum()) for table in made.tables.values())
    area = sum(float(box.get("width")) for box in boxes)  # type: ignore[arg-type]
    m, r = made.microbatches, made.stages
    assert area == pytest.approx(28 * 3.0 * m * r, rel=1e-2)


@pytest.mark.parametrize("width", [400, 80, 20])
def test_a_grid_has_every_work_once_however_narrow(width: int) -> None:
    made = make_schedule("interleaved", 2, 4, 2)
    console = Console(width=width, record=True, file=io.StringIO())
    parts = grid(made, width)
    assert (len(parts) == 1) == (width == 400)
    for part in parts:
        console.print(part)
    text = console.export_text()
    assert "…" not in text and all(len(line.rstrip()) <= width for line in text.splitlines())
    assert all(text.count(f"{k}{m}.{c}") == 2 for k in "FB" for m in range(4) for c in range(2))


def test_figures_stand_beside_the_published_ones() -> None:
    assert "3(M + R - 1) = 33" in figures(make_schedule("one_f_one_b", 4, 8))
    text = figures(make_schedule("zero_bubble", 4, 8))
    assert "cost: 30 " in text and "3M + (R - 1) = 27" in text and "stashes 4" in text
    assert "28.5" in figures(make_schedule("interleaved", 4, 8, 2))


def test_a_schedule_is_a_value_that_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    """As the command prints it; a notebook gets the chart, unless it is too large to read."""
    costs = Costs(head=2.0)
    drawn = schedule("interleaved", stages=2, microbatches=4, chunks=2, costs=costs)
    command = "schedule --kind interleaved --stages 2 --microbatches 4 --chunks 2 --head 2"
    assert cli.main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    figured = figures(drawn.schedule, costs).splitlines()
    assert printed[-len(figured) :] == figured == str(drawn).splitlines()[-len(figured) :]
    assert all(f"{k}3.1" in str(drawn) for k in "FB")
    assert drawn._repr_svg_() == drawn.svg() == svg(drawn.schedule, costs)
    assert drawn.as_json()["cost"] == pytest.approx(as_json(drawn.schedule, costs)["cost"])
    large = DrawnSchedule(make_schedule("gpipe", 100, 100))
    assert large._repr_svg_() is None and "398 ticks of 100 stages are not drawn" in str(large)
    with pytest.raises(ValueError, match="3998 ticks of 1000 stages are no picture"):
        DrawnSchedule(make_schedule("gpipe", 1000, 1000)).svg()
    with pytest.raises(ValueError, match="did you mean"):
        schedule("gpip", stages=2, microbatches=2)
