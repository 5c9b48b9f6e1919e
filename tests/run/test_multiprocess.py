"""Several processes: the same losses as one, each reading its own rows, on one run directory."""

from __future__ import annotations

import json
from pathlib import Path

import multiprocess_worker
import process_group
import pytest
from multiprocess_worker import BATCH, STEPS

from jaxtrain.validation.own_data import TRIED

MAIN = "import multiprocess_worker; multiprocess_worker.main()"


@pytest.mark.slow
def test_two_processes_train_as_one_and_hand_over(tmp_path: Path) -> None:
    outs = [tmp_path / f"{index}.json" for index in range(2)]
    started = process_group.start(
        tmp_path,
        2,
        lambda index, port: ["-c", MAIN, 2, index, port, "two", outs[index]],
        modules=Path(__file__).parent,
    )
    try:
        one = multiprocess_worker.train(tmp_path / "one")  # while they start
    finally:
        process_group.finish(started)
    two = [json.loads(out.read_text()) for out in outs]
    assert all(each["stopped"] for each in two) and not one["stopped"]
    done = len(two[0]["losses"])
    assert 10 < done < STEPS and two[0]["losses"] == two[1]["losses"]
    assert two[0]["saves"] == two[1]["saves"] == [two[0]["saves"][0], done]
    assert one["saves"] == [1, STEPS] and 1 < two[0]["saves"][0] < done
    assert two[0]["losses"] == pytest.approx(one["losses"][:done], rel=1e-6)

    # What two processes saved, one goes on with.
    rest = multiprocess_worker.train(tmp_path / "two")
    assert rest["losses"] == pytest.approx(one["losses"][done:], rel=1e-6)
    assert rest["evaluation"] == pytest.approx(one["evaluation"], rel=1e-6)
    logged = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [*range(1, STEPS + 1)], "one writes"

    # Half of the rows of every batch each, and all of them together; when data is opened its first
    # rows are looked at.
    looked_at = [[*range(n)] for n in (1, 2, TRIED)]
    steps = [[rows for rows in each["read"] if rows not in looked_at][:2] for each in two]
    for number, rows in enumerate(zip(*steps, strict=True)):
        assert sorted(map(len, rows)) == [BATCH // 2, BATCH // 2]
        assert sorted([*rows[0], *rows[1]]) == list(range(number * BATCH, (number + 1) * BATCH))
