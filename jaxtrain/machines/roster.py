"""Chooses the machines of the next start of a run, and the layout on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from jaxtrain.machines.layouts import MachineLayout
from jaxtrain.machines.machine import Machine, Machines
from jaxtrain.machines.pauses import Pauses
from jaxtrain.notices import Tell

POLL_S = 0.05
TELL_S = 30.0
"""Seconds between messages about missing machines."""

REJOIN_S = 10.0
"""Seconds that a run which can go on with fewer machines waits for a lost one, and seconds that a
returned machine must stay before the run grows onto it."""


class Roster:
    """The machines of a run. layouts: number of present machines -> layout; the largest is
    preferred. wait_s: how long missing machines are waited for, before the first start and if no
    layout fits the present ones. tell: prints a line. rejoin_s: as `REJOIN_S`."""

    def __init__(
        self,
        machines: Machines,
        layouts: Mapping[int, MachineLayout],
        wait_s: float,
        tell: Tell,
        rejoin_s: float = REJOIN_S,
    ) -> None:
        self._rejoin_s = rejoin_s
        self._machines, self._layouts, self._wait_s, self._tell = machines, layouts, wait_s, tell
        self._aside: set[str] = set()
        self._present_since: dict[str, tuple[Machine, float]] = {}
        """Name -> machine, and when it was seen first. A machine that returns is another object."""
        self.hosts: list[Machine] = []
        """Machines of the latest start, by process number."""
        self.layout = MachineLayout(0)

    def choose(self, stopped: Callable[[], bool]) -> bool:
        """Waits for machines and chooses those of the next start; returns True if there are enough.
        stopped: returns True once the run is to end."""
        full, began, reported_at = max(self._layouts), time.monotonic(), time.monotonic()
        first, pauses = not self.hosts, Pauses(POLL_S)
        while not stopped():
            present, now = self._usable(), time.monotonic()
            layout = self._layouts.get(min(len(present), full))
            patience = (
                self._wait_s
                if first or layout is None
                else self._rejoin_s * self._some_lost(present)
            )
            waited = now - pauses.moved(began) >= patience or not self._machines.come_and_go
            if layout is not None and (waited or len(present) >= full):
                self._take(present, layout)
                return True
            if waited:
                self._tell(f"launch: {self._too_few(len(present))}")
                return False
            if now - reported_at > TELL_S:
                reported_at = now
                self._tell(f"launch: waits for machines; {len(present)} of {full} are here")
            pauses.sleep()
        return False

    def could_grow(self) -> bool:
        """True if more machines could take part than do, counting those that have been present for
        a while without interruption."""
        before, now = self._present_since, time.monotonic()
        self._present_since = {}
        for machine in self._usable():
            known, since = before.get(machine.name, (machine, now))
            self._present_since[machine.name] = (machine, since if known is machine else now)
        layout = self._layouts.get(min(len(self._stayed()), max(self._layouts)))
        return layout is not None and layout.machines > self.layout.machines

    def forget_stays(self) -> None:
        """Counts the presence of all machines anew: whether they stayed was not seen."""
        self._present_since = {}

    def _stayed(self) -> set[str]:
        now = time.monotonic()
        present = self._present_since.items()
        return {name for name, (_, since) in present if now - since > self._rejoin_s}

    def leaving(self) -> list[str]:
        """Names of machines that take part and are about to leave."""
        return [machine.name for machine in self.hosts if machine.leaving]

    def set_aside(self, processes: Iterable[int]) -> None:
        """Excludes the machines of processes that computed wrongly, for good, if the run can go on
        without them."""
        names = {self.hosts[process].name for process in processes}
        left = sum(machine.name not in names for machine in self._usable())
        if names and min(left, max(self._layouts)) in self._layouts:
            self._aside |= names
            self._tell(f"launch: {', '.join(sorted(names))} computed wrongly, and is left out")

    def _usable(self) -> list[Machine]:
        return [machine for machine in self._machines.present() if machine.name not in self._aside]

    def _some_lost(self, present: list[Machine]) -> bool:
        """True if a machine that took part disappeared without notice: it may return soon."""
        expected = {machine.name for machine in present} | self._aside
        return any(machine.name not in expected and not machine.leaving for machine in self.hosts)

    def _take(self, present: list[Machine], layout: MachineLayout) -> None:
        if layout.machines != len(self.hosts) and len(self._layouts) > 1:
            self._tell(
                f"launch: on {layout.machines} machines, of {max(self._layouts)} wanted and "
                f"{len(present)} here: {layout.description}"
            )
        # Machines that took part or have stayed come before new ones.
        preferred = {host.name for host in self.hosts} | self._stayed()
        present = sorted(present, key=lambda machine: machine.name not in preferred)
        self.hosts, self.layout = present[: layout.machines], layout
        self._present_since = {}

    def _too_few(self, present: int) -> str:
        aside = f" and {', '.join(sorted(self._aside))} is left out" if self._aside else ""
        least, full = min(self._layouts), max(self._layouts)
        needs = f"{least} at least" if least < full else "all of them"
        return (
            f"{present} of {full} machines are here{aside} after {self._wait_s:g} s; the run needs "
            f"{needs}"
        )
