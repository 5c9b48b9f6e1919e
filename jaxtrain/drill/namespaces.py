"""A network for the processes of one machine: each in a namespace of its own, all on one bridge.

Linux's network namespaces make of one machine as many as there are processes, as far as the network
can tell, and a link between them can be cut. The network of the machine itself is not touched.
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

# The collectives of CPUs listen at what the host's name resolves to; an address is its own. Of the
# end of this process the kernel tells by the pipe, and the namespace goes with its last process.
_HOLD = "import socket, sys; socket.sethostname(sys.argv[1]); print(flush=True); sys.stdin.read()"

MAPPED = "unshare --map-root-user --mount"
"""What gives a user who is not root namespaces of his own, where the kernel lets him."""


@dataclass(frozen=True)
class Network:
    """addresses: of each process. holders: a process in the namespace of each."""

    addresses: tuple[str, ...]
    holders: tuple[int, ...]

    def prefix(self, process: int) -> list[str]:
        """What a command begins with to run where `process` is."""
        of = f"/proc/{self.holders[process]}/ns"
        return ["nsenter", f"--net={of}/net", f"--uts={of}/uts", "--"]

    def cut(self, process: int) -> None:
        """From here on nothing reaches `process`, and nothing comes from it."""
        ip(self.prefix(process), f"link set {LINK} down")

    def mend(self, process: int) -> None:
        """As before it was cut."""
        ip(self.prefix(process), f"link set {LINK} up")


def why_not() -> str:
    """Why there can be no such network here; "" where there can."""
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
    """One for so many processes, gone at the end of the block and with this process. Raises OSError
    with what the kernel refuses."""
    with ExitStack() as stack:
        addresses = [f"{SUBNET}.{process + 1}" for process in range(processes)]
        hub = _holder(stack, "hub")
        holders = [_holder(stack, address) for address in addresses]
        lines = [f"link add name {BRIDGE} type bridge", f"link set {BRIDGE} up"]
        for process, holder in enumerate(holders):
            lines.append(f"link add port{process} type veth peer name {LINK} netns {holder}")
            lines.append(f"link set port{process} master {BRIDGE} up")
        ip(["nsenter", f"--net=/proc/{hub}/ns/net", "--"], *lines)
        found = Network(tuple(addresses), tuple(holders))
        for process, address in enumerate(addresses):
            own = ("link set lo up", f"addr add {address}/24 dev {LINK}", f"link set {LINK} up")
            ip(found.prefix(process), *own)
        yield found


def _holder(stack: ExitStack, name: str) -> int:
    """A process that waits in namespaces of its own, as a host of that name."""
    command = ["unshare", "--net", "--uts", sys.executable, "-S", "-c", _HOLD, name]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    holder = subprocess.Popen(command, **pipes, start_new_session=True)
    stack.callback(holder.communicate)  # its input ends, and it with it
    assert holder.stdout is not None and holder.stderr is not None
    if not holder.stdout.readline():
        raise OSError(holder.stderr.read().decode(errors="replace").strip())
    return holder.pid
