"""Which process is beyond a deadline, and which of several is to blame."""

from __future__ import annotations

import pytest

from jaxtrain.cluster.phases import PHASES, Now
from jaxtrain.cluster.sampler import ProcessSample
from jaxtrain.fault_tolerance.deadlines import Deadlines, late

NOW = 1000.0


def sample(phase: str, *, for_s: float, quiet_s: float = 1, step: int = 9, median_s: float = 0.1):
    at = 0.0 if quiet_s < 0 else NOW - quiet_s
    return ProcessSample(Now(phase, step, NOW - for_s, median_s), at)


FINE = sample("step", for_s=2)
CASES = {
    "all fine": ([FINE, FINE], []),
    "a long step": ([sample("step", for_s=20, median_s=5), FINE], []),
    "silent": ([FINE, sample("step", for_s=17, quiet_s=16)], [(1, "silent")]),
    "silent, while another is at a long save": (
        [sample("save", for_s=100), sample("step", for_s=100, quiet_s=16)], [(1, "silent")],
    ),
    "silent, while another compiles": (
        [sample("first step", for_s=9, quiet_s=16), sample("compile", for_s=3000)],
        [(0, "silent")],
    ),
    "silent in a long phase of its own": (
        [FINE, sample("restore", for_s=20, quiet_s=16)], [(1, "silent")],
    ),
    "silent, while another hangs": (
        [sample("load", for_s=16), sample("save", for_s=20, quiet_s=16)], [(1, "silent")],
    ),
    "not yet silent, while another is at a long save": (
        [sample("save", for_s=100), sample("step", for_s=100, quiet_s=14.9)], [],
    ),
    "a start that takes long": ([FINE, sample("start", for_s=299, quiet_s=-1)], []),
    "one that never came to tell": (
        [sample("join", for_s=299), sample("start", for_s=301, quiet_s=-1)], [(1, "hangs")],
    ),
    "the one that waits is late first": (
        [sample("step", for_s=16), sample("step", for_s=14, quiet_s=12)], [(1, "silent")],
    ),
    "a stuck data source": (
        [sample("step", for_s=16), sample("load", for_s=16)], [(1, "hangs")],
    ),
    "a stuck data source, a step behind": (
        [sample("step", for_s=15.5, step=10), sample("load", for_s=15.6)], [(1, "hangs")],
    ),
    "a stuck callback": (
        [sample("callback", for_s=15.1), sample("step", for_s=15.2)], [(0, "hangs")],
    ),
    "a stuck collective": (
        [sample("step", for_s=16), sample("step", for_s=16)], [(0, "hangs"), (1, "hangs")],
    ),
    "a stuck collective that one came to a little later": (
        [sample("step", for_s=15.1), sample("step", for_s=13.1)], [(0, "hangs"), (1, "hangs")],
    ),
    "a collective for which the others waited long": (
        [sample("step", for_s=90), sample("step", for_s=12.9)], [],
    ),
    "a step for which one that is further on waited long": (
        [sample("step", for_s=90, step=10), sample("step", for_s=3)], [],
    ),
    "a stuck collective that one has not reached": (
        [sample("step", for_s=16, step=8), sample("step", for_s=16)], [(0, "hangs")],
    ),
    "one waits for another's long save": (
        [sample("save", for_s=16), sample("step", for_s=16)], [],
    ),
    "one waits for another's compilation, in its first step": (
        [sample("compile", for_s=2000), sample("first step", for_s=1000)], [],
    ),
    "for a save that has become too long": (
        [sample("save", for_s=901), sample("step", for_s=901)], [(0, "hangs")],
    ),
    "a long compilation": ([sample("compile", for_s=1000), sample("open", for_s=1000)], []),
    "a first step": ([sample("first step", for_s=100), sample("first step", for_s=599)], []),
    "too long a first step": ([sample("first step", for_s=601)], [(0, "hangs")]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_who_is_to_blame(name: str) -> None:
    samples, blamed = CASES[name]
    found = late(dict(enumerate(samples)), NOW, Deadlines(silence=15, step=15))
    assert [(each.process, each.kind) for each in found] == blamed


def test_every_phase_has_a_deadline_of_its_own() -> None:
    for phase in PHASES:
        assert Deadlines().limit_s(phase, 0.0) > 0
    assert Deadlines(step=3).limit_s("load", 0.1) == 3
    assert Deadlines(step=3).limit_s("step", 0.5) == 5
    assert Deadlines(compile=7, step=3).limit_s("compile", 0.5) == 7


def test_a_silence_or_a_stuck_step_is_noticed_within_15_s() -> None:
    """With half a second between two looks."""
    assert Deadlines().silence <= 14.5 and Deadlines().limit_s("step", 0.1) <= 14.5


def test_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match=r"silence=0 must be a finite .*; save=-1 must be"):
        Deadlines(silence=0, save=-1)
