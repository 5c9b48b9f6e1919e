"""Buffer numbers against a player who follows the rows tick by tick and looks at what he reads.

The player knows the pipeline only: which position hands what to which, and the order of a tick (F,
its input from the embedding; the head, or with the last B where that is later; B; the embedding's
gradient; W; then what neighbours send).
Every buffer holds a label of what was put there, so a wrong read and an early overwrite both show.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from jaxtrain.pipeline.analysis import Lifetimes, slots, violations
from jaxtrain.pipeline.schedule import KINDS, Schedule, make_schedule
from jaxtrain.pipeline.slots import SlotTables, StageBuffers, forward_only, number_buffers, training

EVERY = [
    (kind, stages, microbatches, chunks)
    for kind in KINDS
    for stages in range(1, 7)
    for microbatches in range(1, 13)
    for chunks in range(1, 4)
    if (kind == "zero_bubble") or (kind == "interleaved") == (chunks > 1)
]


class Player:
    """All stages of a pipeline, and what lies in their buffers: (microbatch, position) or None."""

    def __init__(self, rows: SlotTables, buffers: StageBuffers, chunks: int, *, kept: bool) -> None:
        self.rows, self.kept, self.chunks = rows, kept, chunks
        self.stages = rows.forward.shape[1]
        self.last = self.stages * chunks - 1
        self.training, self.late_head = buffers.cotangents > 0, buffers.late_head
        self.room = {
            name: [[None] * count for _ in range(self.stages)]
            for name, count in buffers._asdict().items()
            if name != "late_head"
        }
        self.done: Counter[tuple[str, int, int]] = Counter()

    def play(self) -> Counter[tuple[str, int, int]]:
        """How often each (what, microbatch, position) was done."""
        for tick in range(len(self.rows.forward)):
            each = range(self.stages)
            made = [self._forward(tick, stage) for stage in each]
            late = self._work(self.rows.backward, tick, self.stages - 1)
            self._leave(tick, late if self.late_head else made[-1])
            back = [self._backward(tick, stage) for stage in each]
            self._exit(tick, back[0])
            for stage in each:
                self._weight(tick, stage)
            for stage in each:
                self._receive("input", tick, stage, made[(stage - 1) % self.stages])
                self._receive("cotangent", tick, stage, back[(stage + 1) % self.stages])
        return self.done

    def _work(self, table: np.ndarray, tick: int, stage: int) -> tuple[int, int] | None:
        """(microbatch, position)"""
        if table[tick, stage] < 0:
            return None
        microbatch, chunk = divmod(int(table[tick, stage]), self.chunks)
        return microbatch, chunk * self.stages + stage

    def _read(self, name: str, stage: int, slot: int, wanted: tuple[int, int]) -> None:
        assert slot >= 0, (name, stage, wanted)
        assert self.room[name][stage][slot] == wanted, (name, stage, slot)

    def _write(self, name: str, stage: int, slot: int, what: tuple[int, int]) -> None:
        assert slot >= 0, (name, stage, what)
        self.room[name][stage][slot] = what

    def _forward(self, tick: int, stage: int) -> tuple[int, int] | None:
        rows, work = self.rows, self._work(self.rows.forward, tick, stage)
        slot = rows.forward_input[tick, stage]
        if stage == 0:
            enters = work is not None and work[1] == 0
            assert rows.enter[tick] == (work[0] if enters else -1)
            if enters:
                self._write("inputs", stage, slot, work)
                self.done["enter", *work] += 1
        if work is None:
            assert slot == rows.forward_residuals[tick, stage] == -1
            return None
        self._read("inputs", stage, slot, work)
        if self.kept:
            self._write("residuals", stage, rows.forward_residuals[tick, stage], work)
        self.done["F", *work] += 1
        return work

    def _leave(self, tick: int, work: tuple[int, int] | None) -> None:
        leaves = work is not None and work[1] == self.last
        assert self.rows.leave[tick] == (work[0] if leaves else -1)
        slot = self.rows.leave_cotangent[tick]
        assert (slot >= 0) == (leaves and self.training)
        if leaves:
            self.done["leave", *work] += 1
            if self.training:
                self._write("cotangents", self.stages - 1, slot, work)

    def _backward(self, tick: int, stage: int) -> tuple[int, int] | None:
        rows, work = self.rows, self._work(self.rows.backward, tick, stage)
        mine = [rows.backward_input, rows.backward_residuals, rows.backward_cotangent]
        where = [int(table[tick, stage]) for table in (*mine, rows.backward_stash)]
        if work is None:
            assert where == [-1] * 4
            return None
        if self.kept:
            self._read("residuals", stage, where[1], work)
        else:
            self._read("inputs", stage, where[0], work)
        self._read("cotangents", stage, where[2], work)
        if self.room["stashes"][stage]:
            self._write("stashes", stage, where[3], work)
        self.done["B", *work] += 1
        return work

    def _exit(self, tick: int, work: tuple[int, int] | None) -> None:
        exits = work is not None and work[1] == 0
        assert self.rows.exit[tick] == (work[0] if exits else -1)
        if exits:
            self.done["exit", *work] += 1

    def _weight(self, tick: int, stage: int) -> None:
        work = self._work(self.rows.weight, tick, stage)
        slot = self.rows.weight_stash[tick, stage]
        if work is None:
            assert slot == -1
            return
        self._read("stashes", stage, slot, work)
        self.done["W", *work] += 1

    def _receive(self, what: str, tick: int, stage: int, sent: tuple[int, int] | None) -> None:
        """What the neighbour made goes on by one position, if there is one."""
        way, end = (1, self.last) if what == "input" else (-1, 0)
        slot = getattr(self.rows, f"receive_{what}")[tick, stage]
        if sent is None or sent[1] == end:
            assert slot == -1
        else:
            self._write(f"{what}s", stage, slot, (sent[0], sent[1] + way))


def wanted(schedule: Schedule, letters: str) -> Counter[tuple[str, int, int]]:
    """Everything once."""
    positions = schedule.stages * schedule.chunks
    found: Counter[tuple[str, int, int]] = Counter()
    for m in range(schedule.microbatches):
        found.update((letter, m, p) for letter in letters for p in range(positions))
        found.update([("enter", m, 0), ("leave", m, positions - 1)])
        found.update([("exit", m, 0)] if "B" in letters else [])
    return found


def most_held(begin: np.ndarray, end: np.ndarray) -> int:
    """[work, stage] ticks, both inclusive -> the most at once on any stage."""
    ticks = np.arange(end.max() + 1)[:, None, None]
    return int(((begin <= ticks) & (ticks <= end)).sum(1).max())


def ticks_of(table: np.ndarray, works: int) -> np.ndarray:
    """[work, stage]: where each stands."""
    return (table[:, None, :] == np.arange(works)[:, None]).argmax(0)


def head_could_wait(schedule: Schedule) -> bool:
    """Whether some microbatch's last F is not in the tick of its first B."""
    ends = schedule.chunks - 1 + schedule.chunks * np.arange(schedule.microbatches)
    works = schedule.microbatches * schedule.chunks
    forward, backward = (ticks_of(t, works) for t in (schedule.forward, schedule.backward))
    return bool((forward[ends, -1] < backward[ends, -1]).any())


def follow(schedule: Schedule) -> list[StageBuffers]:
    """Play it as a step that keeps inputs, one that keeps residuals, and an evaluation."""
    found = []
    for keep in (False, True):
        rows, buffers = training(schedule, keep_residuals=keep)
        done = Player(rows, buffers, schedule.chunks, kept=keep).play()
        assert done == wanted(schedule, "FB" if schedule.weight is None else "FBW")
        assert {table.dtype for table in rows} == {np.dtype(np.int32)}
        assert bool(buffers.residuals) == keep
        assert buffers.late_head == (not keep and head_could_wait(schedule))
        found.append(buffers)
    rows, buffers = forward_only(schedule)
    done = Player(rows, buffers, schedule.chunks, kept=False).play()
    assert done == wanted(schedule, "F")
    assert (rows.forward[-1] >= 0).any(), "ticks after the last F"
    assert buffers[1:] == (0, 0, 0, False)
    return [*found, buffers]


def counted(schedule: Schedule) -> None:
    """No more buffers than are held at once."""
    for keep, found in zip((False, True), follow(schedule), strict=False):
        most = {"stashes": 0, "residuals": 0, **slots(schedule, keep_residuals=keep)}
        assert found.residuals == most.pop("residuals")
        assert {name: getattr(found, name) for name in most} == most
    works = schedule.microbatches * schedule.chunks
    forward, backward = (ticks_of(t, works) for t in (schedule.forward, schedule.backward))
    assert found.residuals == most_held(forward, backward)
    if schedule.weight is not None:
        assert found.stashes == most_held(backward, ticks_of(schedule.weight, works))


@pytest.mark.parametrize("kind", KINDS)
def test_every_read_finds_what_it_wants(kind: str) -> None:
    for each, *size in EVERY:
        if each == kind:
            counted(make_schedule(kind, *size))


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_do_not_grow_with_microbatches_but_for_gpipe(kind: str) -> None:
    for stages in range(1, 7):
        for chunks in (2, 3) if kind == "interleaved" else (1,):
            sizes = [make_schedule(kind, stages, m * stages, chunks) for m in (3, 4, 8)]
            for keep in (False, True):
                found = [training(schedule, keep_residuals=keep)[1] for schedule in sizes]
                held = [buffers.residuals if keep else buffers.inputs for buffers in found]
                if kind == "gpipe":
                    assert held == [3 * stages, 4 * stages, 8 * stages]
                    waiting = [buffers.cotangents for buffers in found]
                    assert waiting == (held if keep else [1, 1, 1])
                else:
                    assert found[0] == found[1] == found[2]


def random_table(rng: np.random.Generator) -> Schedule:
    """Any order of microbatches and chunks, with pauses: a stage does what it can, or does not."""
    stages, microbatches, chunks = (int(n) for n in rng.integers(1, [6, 8, 4]))
    letters, lazy = "FBW" if rng.random() < 0.5 else "FB", rng.uniform(0.0, 0.7)
    last = stages * chunks - 1
    todo = {(k, m, p) for k in letters for m in range(microbatches) for p in range(last + 1)}
    at: dict[tuple[str, int, int], int] = {}
    rows: dict[str, list[list[int]]] = {letter: [] for letter in letters}

    def ready(letter: str, m: int, p: int, tick: int) -> bool:
        if letter == "F":
            return p == 0 or at.get(("F", m, p - 1), tick) < tick
        if letter == "W":
            return ("B", m, p) in at
        arrived = p == last or at.get(("B", m, p + 1), tick) < tick
        return ("F", m, p) in at and arrived

    tick = 0
    while todo:
        for letter in letters:
            row = [-1] * stages
            for stage in range(stages):
                mine = [w for w in sorted(todo) if w[0] == letter and w[2] % stages == stage]
                can = [w for w in mine if ready(*w, tick)]
                if can and rng.random() >= lazy:
                    work = can[rng.integers(len(can))]
                    row[stage] = work[1] * chunks + work[2] // stages
                    at[work] = tick
                    todo.remove(work)
            rows[letter].append(row)
        tick += 1
    tables = [np.array(rows[letter]) if letter in letters else None for letter in "FBW"]
    return Schedule("mine", stages, microbatches, chunks, *tables)


@pytest.mark.parametrize("seed", range(4))
def test_a_users_own_table_in_any_order_with_pauses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(40):
        schedule = random_table(rng)
        assert violations(schedule) == []
        counted(schedule)


@pytest.mark.parametrize("field", SlotTables._fields)
def test_the_player_sees_every_wrong_number(field: str) -> None:
    """So the tests above can fail."""
    schedule, keep = make_schedule("zero_bubble", 3, 6, 2), field.endswith("residuals")
    rows, buffers = training(schedule, keep_residuals=keep)
    table = getattr(rows, field)
    places = np.argwhere(table >= 0)
    assert len(places)
    for place in places[:: 1 + len(places) // 20]:
        wrong = table.copy()
        wrong[tuple(place)] += 1 if wrong[tuple(place)] == 0 else -1
        with pytest.raises((AssertionError, IndexError)):
            done = Player(rows._replace(**{field: wrong}), buffers, 2, kept=keep).play()
            assert done == wanted(schedule, "FBW")


def test_the_player_sees_a_buffer_that_is_taken_a_tick_too_soon(monkeypatch) -> None:
    def soon(life: Lifetimes) -> np.ndarray:
        return number_buffers(Lifetimes(life.first, np.maximum(life.last - 1, life.first)))

    monkeypatch.setattr("jaxtrain.pipeline.slots.number_buffers", soon)
    with pytest.raises(AssertionError):
        follow(make_schedule("zero_bubble", 3, 6))
