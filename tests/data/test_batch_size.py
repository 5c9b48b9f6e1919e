"""Batch ramps: the closed form against adding up, step by step."""

from __future__ import annotations

import numpy as np
import pytest

from jaxtrain.data.batch_size import BatchRamp, batch_of, first_row, rows_of_step

RAMPS = [
    BatchRamp(start=2, end=8, increment=2, steps=3),
    BatchRamp(start=4, end=4, increment=1, steps=5),
    BatchRamp(start=1, end=10, increment=3, steps=1),
    BatchRamp(start=16, end=32, increment=16, steps=7),
    6,
]


@pytest.mark.parametrize("batch", RAMPS, ids=str)
def test_rows_follow_one_another_without_gap_or_overlap(batch: int | BatchRamp) -> None:
    begin = 0
    for step in range(60):
        rows = rows_of_step(batch, step)
        assert first_row(batch, step) == begin
        np.testing.assert_array_equal(rows, np.arange(begin, begin + batch_of(batch, step)))
        begin += len(rows)


@pytest.mark.parametrize("ramp", RAMPS[:-1], ids=str)
def test_the_batch_grows_from_start_to_end(ramp: BatchRamp) -> None:
    sizes = [ramp.batch(step) for step in range(60)]
    assert sizes[0] == ramp.start and sizes[-1] == ramp.end
    assert sorted(sizes) == sizes and tuple(dict.fromkeys(sizes)) == ramp.sizes
    assert all(sizes.count(size) == ramp.steps for size in ramp.sizes[:-1])


def test_bad_ramps_are_refused_with_every_reason() -> None:
    with pytest.raises(ValueError, match=r"start=0 counts from 1; steps=-1 counts from 1"):
        BatchRamp(start=0, end=4, increment=2, steps=-1)
    with pytest.raises(ValueError, match=r"end=9 is not .*; use end=8 or 11"):
        BatchRamp(start=2, end=9, increment=3, steps=1)
    with pytest.raises(ValueError, match=r"end=1 is not .*; use end=2 or 5"):
        BatchRamp(start=2, end=1, increment=3, steps=1)
