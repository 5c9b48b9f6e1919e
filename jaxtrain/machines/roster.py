"""Which machines the next start of a run is on, and how it stands on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from jaxtrain.machines.layouts import Layout
from jaxtrain.machines.machine import Machine, Machines
from jaxtrain.machines.workers import Tell

POLL_S = 0.05
TELL_S = 30.0
"""How often it is told that machines are missing."""

REJOIN_S = 10.0
"""How long a run that can go on with fewer waits for a machine that it has lost, and how long one
that is there again must stay before the run grows onto it."""


class Roster:
    """The machines of a run. layouts: number of machines that are there -> how the run stands on
    them; the largest is wanted. wait_s: how long those that are missing are waited for, before the
    first start, and where nothing stands on those that are there. tell: takes a line. rejoin_s: as
    `REJOIN_S`."""

    def __init__(
        self,
        machines: Machines,
        layouts: Mapping[int, Layout],
        wait_s: float,
        tell: Tell,
        rejoin_s: float = REJOIN_S,
    ) -> None:
        self._rejoin_s = rejoin_s
        self._machines, self._layouts, self._wait_s, self._tell = machines, layouts, wait_s, tell
        self._aside: set[str] = set()
        self._here_since: dict[str, float] = {}
        self.hosts: list[Machine] = []
        """Those of the latest start: the process of each number is on that one."""
        self.layout = Layout(0)

    def choose(self, stopped: Callable[[], bool]) -> bool:
        """Wait for machines and take those of the next start; whether there are enough. stopped:
        whether nobody waits any more."""
        wanted, began, told = max(self._layouts), time.monotonic(), time.monotonic()
        first = not self.hosts
        while not stopped():
            here, now = self._usable(), time.monotonic()
            found = self._layouts.get(min(len(here), wanted))
            patience = (
                self._wait_s if first or found is None else self._rejoin_s * self._some_lost(here)
            )
            waited = now - began >= patience or not self._machines.come_and_go
            if found is not None and (waited or len(here) >= wanted):
                self._take(here, found)
                return True
            if waited:
                self._tell(f"launch: {self._too_few(len(here))}")
                return False
            if now - told > TELL_S:
                told = now
                self._tell(f"launch: waits for machines; {len(here)} of {wanted} are here")
            time.sleep(POLL_S)
        return False

    def could_grow(self) -> bool:
        """Whether more machines could take part than do, of those that have been there for a while
        without a break."""
        now = time.monotonic()
        self._here_since = {
            machine.name: self._here_since.get(machine.name, now) for machine in self._usable()
        }
        layout = self._layouts.get(min(len(self._stayed()), max(self._layouts)))
        return layout is not None and layout.machines > self.layout.machines

    def _stayed(self) -> set[str]:
        now = time.monotonic()
        return {n for n, since in self._here_since.items() if now - since > self._rejoin_s}

    def leaving(self) -> list[str]:
        """Names of machines that take part and are to go."""
        return [each.name for each in self.hosts if each.leaving]

    def set_aside(self, processes: Iterable[int]) -> None:
        """Leave out the machines of processes that computed wrongly, for good, where the run can go
        on without."""
        names = {self.hosts[process].name for process in processes}
        left = sum(each.name not in names for each in self._usable())
        if names and min(left, max(self._layouts)) in self._layouts:
            self._aside |= names
            self._tell(f"launch: {', '.join(sorted(names))} computed wrongly, and is left out")

    def _usable(self) -> list[Machine]:
        return [each for each in self._machines.present() if each.name not in self._aside]

    def _some_lost(self, here: list[Machine]) -> bool:
        """Whether one that took part is gone without a word: it may be there again soon."""
        known = {each.name for each in here} | self._aside
        return any(each.name not in known and not each.leaving for each in self.hosts)

    def _take(self, here: list[Machine], layout: Layout) -> None:
        if layout.machines != len(self.hosts) and len(self._layouts) > 1:
            self._tell(
                f"launch: on {layout.machines} machines, of {max(self._layouts)} wanted and "
                f"{len(here)} here: {layout.told}"
            )
        # Those that took part or have stayed before one that has just come.
        known = {host.name for host in self.hosts} | self._stayed()
        here = sorted(here, key=lambda machine: machine.name not in known)
        self.hosts, self.layout = here[: layout.machines], layout
        self._here_since = {}

    def _too_few(self, here: int) -> str:
        aside = f" and {', '.join(sorted(self._aside))} is left out" if self._aside else ""
        least, wanted = min(self._layouts), max(self._layouts)
        needs = f"{least} at least" if least < wanted else "all of them"
        return (
            f"{here} of {wanted} machines are here{aside} after {self._wait_s:g} s; the run needs "
            f"{needs}"
        )
