"""Faults of what a process runs on: a disk that is full, a link that is down."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

LINK = "jaxtrain0"
"""The interface of each process to the others, in a network that a drill makes."""

ZEROS = "zeros"
"""A file in the run directory, which has all that was free."""

LARGEST = 2**30
"""Bytes of a file system that may be filled: a larger one has others' files."""


def refuse_large(run_dir: Path) -> list[str]:
    """Why the file system of a run directory must not be filled."""
    there = next(
        each for each in (run_dir.absolute(), *run_dir.absolute().parents) if each.exists()
    )
    size = shutil.disk_usage(there).total
    if size <= LARGEST:
        return []
    return [
        f"full: the file system of {run_dir} has {size / 1e9:.1f} GB, which others may need; give "
        f"a --run-dir on one of {LARGEST / 1e9:.1f} GB at most, such as mount -t tmpfs -o size=64m "
        "tmpfs FOLDER makes"
    ]


def fill(run_dir: Path) -> None:
    """Leave no byte free."""
    size = 2**20
    with (run_dir / ZEROS).open("wb", buffering=0) as file:
        while size:
            try:
                file.write(bytes(size))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                size //= 2


def empty(run_dir: Path) -> None:
    """As before it was filled."""
    (run_dir / ZEROS).unlink(missing_ok=True)


def refuse_mounting() -> list[str]:
    """Why a run directory cannot be made read-only."""
    return [] if os.geteuid() == 0 else ["readonly: only root may mount; run it as root"]


def make_readonly(run_dir: Path) -> None:
    """Nothing can be made, opened to be written or removed there: it is mounted over itself. Raises
    OSError with what mount says."""
    run_command("mount", "--bind", str(run_dir), str(run_dir))
    run_command("mount", "-o", "remount,bind,ro", str(run_dir))


def make_writable(run_dir: Path) -> None:
    """As before it was made read-only."""
    if run_dir.exists() and os.statvfs(run_dir).f_flag & os.ST_RDONLY:
        run_command("umount", "--lazy", str(run_dir))


def run_command(*command: str) -> None:
    """Raises OSError with what it says where it fails."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise OSError(ran.stderr.strip())


def refuse_shared_link() -> list[str]:
    """Why there is no link to cut: a machine's own is not ours."""
    if LINK in (name for _, name in socket.if_nameindex()):
        return []
    return [
        f"cut: this process has no link {LINK} of its own; it is for the networks that "
        "`jaxtrain drill` makes"
    ]


def cut_link() -> None:
    """Of this process to the others, until the network is mended."""
    ip([], f"link set {LINK} down")


def ip(prefix: Sequence[str], *lines: str) -> None:
    """ip(8) of a command's beginning, given these lines. Raises OSError with what it says."""
    ran = subprocess.run(
        [*prefix, "ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if ran.returncode:
        raise OSError(f"ip: {ran.stderr.strip()}")
