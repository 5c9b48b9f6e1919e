"""What schedules cost beside their time: idle work, memory, and whether they pay."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from jaxtrain.pipeline.analysis import bubble, in_flight, slots
from jaxtrain.pipeline.overhead import (
    executed_over_useful,
    handed_over_useful,
    published_in_flight,
    warnings,
)
from jaxtrain.pipeline.picture import as_json, figures
from jaxtrain.pipeline.schedule import Costs, make_schedule

KINDS = [("gpipe", 1), ("one_f_one_b", 1), ("interleaved", 2), ("interleaved", 4)]
KINDS += [("zero_bubble", 1), ("zero_bubble", 3)]
SIZES = list(product(KINDS, (1, 2, 4, 8), (1, 2, 3, 8, 9)))


@pytest.mark.parametrize(("kind", "stages", "microbatches"), SIZES, ids=str)
def test_idle_ticks_work_too(kind, stages, microbatches) -> None:
    """Everything takes as long as it is work, so what is done over what is needed is the step over
    its busy part; and B takes a third more of it where it runs F again."""
    schedule = make_schedule(kind[0], stages, microbatches, kind[1])
    kept = executed_over_useful(schedule, keep_residuals=True)
    assert kept == pytest.approx(1 / (1 - bubble(schedule)))
    again = executed_over_useful(schedule, keep_residuals=False)
    backward = sum((row >= 0).any() for row in schedule.backward)
    assert again - kept == pytest.approx(backward / (3 * microbatches * kind[1]))


CLOSED = [
    ("one_f_one_b", 4, 8, 1, 11 / 8, 11 / 6),
    ("gpipe", 4, 8, 1, 11 / 8, 11 / 6),
    ("interleaved", 4, 8, 2, 19 / 16, 19 / 12),
    ("zero_bubble", 4, 8, 1, 30 / 24, 41 / 24),
    ("one_f_one_b", 1, 5, 1, 1.0, 4 / 3),
]


@pytest.mark.parametrize("case", CLOSED, ids=str)
def test_closed_forms(case) -> None:
    *size, kept, again = case
    schedule = make_schedule(*size)
    assert executed_over_useful(schedule, keep_residuals=True) == pytest.approx(kept)
    assert executed_over_useful(schedule, keep_residuals=False) == pytest.approx(again)


@pytest.mark.parametrize(("kind", "stages", "microbatches"), SIZES, ids=str)
def test_what_is_handed_on_and_what_of_it_is_read(kind, stages, microbatches) -> None:
    """A microbatch goes over R V - 1 edges and back; in a tick with F, or with B, all stages but
    the last send, with chunks all of them. After the last that is read a loop may send no more."""
    name, chunks = kind
    schedule = make_schedule(name, stages, microbatches, chunks)
    read = 2 * microbatches * (stages * chunks - 1)
    senders = stages if chunks > 1 else stages - 1
    ticks = sum((row >= 0).any() for t in (schedule.forward, schedule.backward) for row in t)
    found = handed_over_useful(schedule)
    if not read:
        assert found == 1.0
        return
    # A loop of one tick, at the end, in which nothing is handed on.
    assert 1.0 <= found <= senders * ticks / read
    if microbatches % stages == 0 and stages > 2 and name != "zero_bubble":
        assert found == pytest.approx(senders * ticks / read)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (4, 2), (8, 16)])
def test_memory_beside_what_was_published(stages, microbatches) -> None:
    """In lock-step GPipe and interleaving hold what they hold elsewhere, 1F1B almost twice that."""

    def both(kind, chunks=1):
        schedule = make_schedule(kind, stages, microbatches, chunks)
        published = published_in_flight(schedule)
        return in_flight(schedule).tolist(), None if published is None else published[1]

    ours, theirs = both("gpipe")
    assert ours == theirs
    ours, theirs = both("one_f_one_b")
    r = np.arange(stages)
    assert ours == np.minimum(2 * (stages - 1 - r) + 1, microbatches).tolist()
    assert theirs == np.minimum(stages - r, microbatches).tolist()
    ours, theirs = both("interleaved", 2)
    assert (theirs is None) == (microbatches % stages > 0)
    assert theirs is None or ours == theirs
    assert both("zero_bubble")[1] == [min(stages, microbatches)] * stages
    assert both("zero_bubble", 2)[1] is None


ADVICE = [
    (("one_f_one_b", 4, 8, 1), ()),
    (("gpipe", 4, 7, 1), ()),
    (("gpipe", 4, 8, 1), ("costs 33 where one_f_one_b costs 33", "8 inputs for 7")),
    (("interleaved", 4, 8, 2), ()),
    (("interleaved", 8, 9, 4), ("costs 48", "33 inputs for 9", "microbatches=8 or 16")),
    (("interleaved", 4, 1, 2), ("microbatches=4",)),
    (("zero_bubble", 4, 8, 1), ()),
    (("zero_bubble", 8, 9, 4), ()),
    (("zero_bubble", 2, 8, 1), ("does not pay on two stages", "use one_f_one_b")),
    (("zero_bubble", 1, 8, 1), ("costs 24 where one_f_one_b costs 24", "1 stashes for 0")),
]


@pytest.mark.parametrize(("size", "words"), ADVICE, ids=str)
def test_a_table_that_does_not_pay_is_told(size, words) -> None:
    schedule = make_schedule(*size)
    text = " ".join(warnings(schedule))
    assert bool(text) is bool(words) and all(word in text for word in words), text
    assert ("warning: " in figures(schedule)) is bool(words)
    assert as_json(schedule)["warnings"] == warnings(schedule)


@pytest.mark.parametrize("microbatches", range(1, 20))
def test_a_group_of_one_is_what_chunks_do_not_pay_for(microbatches) -> None:
    """It goes through the pipeline three times, each time alone."""
    found = warnings(make_schedule("interleaved", 4, microbatches, 3))
    assert bool(found) is (microbatches % 4 == 1)


def test_costs_of_ones_own_decide() -> None:
    """Those of the machine, where they are known."""
    schedule = make_schedule("interleaved", 8, 9, 4)
    assert warnings(schedule, Costs(forward=5.0, head=3.0))
    assert not warnings(make_schedule("interleaved", 8, 16, 4), Costs(forward=5.0, head=3.0))


def test_figures_and_json_have_all_of_it() -> None:
    schedule = make_schedule("one_f_one_b", 4, 8)
    text, found = figures(schedule), as_json(schedule)
    assert "1.375" in text and "1.833" in text
    assert "7 5 3 1; Narayanan et al. 2021, stages not in step: 4 3 2 1" in text
    assert found["executed_over_useful"] == {"inputs": 11 / 6, "residuals": 11 / 8}
    assert found["handed_over_useful"] == 11 / 8
    assert found["published_in_flight"] == [4, 3, 2, 1] and found["slots"] == slots(schedule)
