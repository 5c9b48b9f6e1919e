"""A network for the processes of one machine: each in a namespace of its own, all on one bridge.

With Linux's network namespaces, one machine looks to the network like one per process, and the link
between two can be cut. The machine's own network is not touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from jaxtrain.fault_tolerance.machine_faults import LINK, ip

BRIDGE, SUBNET = "hub0", "10.213.0"

PROGRAMS = ("unshare", "nsenter", "ip")

# CPU collectives listen at the address of the host's name; an address resolves to itself. When this
# process ends, its pipe closes, the holder ends, and with it the namespace.
_HOLD = "import socket, sys; socket.sethostname(sys.argv[1]); print(flush=True); sys.stdin.read()"

MAPPED = "unshare --map-root-user --mount"
"""Command that gives namespaces to a user who is not root, if the kernel allows it."""


@dataclass(frozen=True)
class Network:
    """addresses: of each process. holders: ids of processes that keep the namespaces alive."""

    addresses: tuple[str, ...]
    holders: tuple[int, ...]

    def prefix(self, process: int) -> list[str]:
        """Prefix of a command that is to run in the namespace of `process`."""
        namespaces = f"/proc/{self.holders[process]}/ns"
        return ["nsenter", f"--net={namespaces}/net", f"--uts={namespaces}/uts", "--"]

    def cut(self, process: int) -> None:
        """Cuts the link of `process` in both directions."""
        ip(self.prefix(process), f"link set {LINK} down")

    def mend(self, process: int) -> None:
        """Restores the link of `process`."""
        ip(self.prefix(process), f"link set {LINK} up")


def why_not() -> str:
    """Reason why such a network is impossible here; empty if it is possible."""
    if sys.platform != "linux":
        return "only Linux has network namespaces"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"there is no {', '.join(missing)} here"
    if os.geteuid() != 0:
        return f"network namespaces want root; {MAPPED} COMMAND may give it"
    tried = subprocess.run(
        ["unshare", "--net", "--uts", "true"], capture_output=True, text=True, check=False
    )
    return tried.stderr.strip() if tried.returncode else ""


@contextmanager
def network(processes: int) -> Iterator[Network]:
    """Creates a network for `processes` processes; it ends with the block or with this process.
    Raises OSError with the kernel's reason."""
    with ExitStack() as stack:
        addresses = [f"{SUBNET}.{process + 1}" for process in range(processes)]
        hub = _holder(stack, "hub")
        holders = [_holder(stack, address) for address in addresses]
        lines = [f"link add name {BRIDGE} type bridge", f"link set {BRIDGE} up"]
        for process, holder in enumerate(holders):
            lines.append(f"link add port{process} type veth peer name {LINK} netns {holder}")
            lines.append(f"link set port{process} master {BRIDGE} up")
        ip(["nsenter", f"--net=/proc/{hub}/ns/net", "--"], *lines)
        created = Network(tuple(addresses), tuple(holders))
        for process, address in enumerate(addresses):
            own = ("link set lo up", f"addr add {address}/24 dev {LINK}", f"link set {LINK} up")
            ip(created.prefix(process), *own)
        yield created


def _holder(stack: ExitStack, name: str) -> int:
    """Starts a process in namespaces of its own, with host name `name`; returns its id."""
    command = ["unshare", "--net", "--uts", sys.executable, "-S", "-c", _HOLD, name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    holder = subprocess.Popen(command, **pipes, start_new_session=True)
    stack.callback(holder.communicate)  # closes its input, which ends it
    assert holder.stdout is not None and holder.stderr is not None
    if not holder.stdout.readline():
        raise OSError(holder.stderr.read().decode(errors="replace").strip())
    return holder.pid
