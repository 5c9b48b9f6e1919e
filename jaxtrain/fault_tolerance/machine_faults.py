"""Faults of a process's environment: a full or read-only disk, a link that is down."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

LINK = "jaxtrain0"
"""Network interface of each process, in a network that a drill makes."""

ZEROS = "zeros"
"""File in the run directory that fills the disk."""

LARGEST = 2**30
"""Most bytes of a file system that may be filled: a larger one may be shared."""


def refuse_large(run_dir: Path) -> list[str]:
    """Violation if a run directory's file system must not be filled."""
    existing = next(
        path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists()
    )
    size = shutil.disk_usage(existing).total
    if size <= LARGEST:
        return []
    return [
        f"full: the file system of {run_dir} has {size / 1e9:.1f} GB, which others may need; give "
        f"a --run-dir on one of {LARGEST / 1e9:.1f} GB at most, such as mount -t tmpfs -o size=64m "
        "tmpfs FOLDER makes"
    ]


def fill(run_dir: Path) -> None:
    """Fills the disk to the last byte."""
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
    """Frees the disk again."""
    (run_dir / ZEROS).unlink(missing_ok=True)


def refuse_mounting() -> list[str]:
    """Violation if a run directory cannot be made read-only."""
    return [] if os.geteuid() == 0 else ["readonly: only root may mount; run it as root"]


def make_readonly(run_dir: Path) -> None:
    """Makes the directory read-only, by a bind mount over itself. Raises OSError with the message
    of mount."""
    run_command("mount", "--bind", str(run_dir), str(run_dir))
    run_command("mount", "-o", "remount,bind,ro", str(run_dir))


def make_writable(run_dir: Path) -> None:
    """Removes the read-only mount."""
    if run_dir.exists() and os.statvfs(run_dir).f_flag & os.ST_RDONLY:
        run_command("umount", "--lazy", str(run_dir))


def run_command(*command: str) -> None:
    """Runs a command. Raises OSError with its message if it fails."""
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise OSError(ran.stderr.strip())


def refuse_shared_link() -> list[str]:
    """Violation if there is no own link to cut: a machine's link is not ours."""
    if LINK in (name for _, name in socket.if_nameindex()):
        return []
    return [
        f"cut: this process has no link {LINK} of its own; it is for the networks that "
        "`jaxtrain drill` makes"
    ]


def cut_link() -> None:
    """Cuts this process's link to the others, until the network is repaired."""
    ip([], f"link set {LINK} down")


def ip(prefix: Sequence[str], *lines: str) -> None:
    """Runs ip(8) on these lines, after the command `prefix`. Raises OSError with its message."""
    ran = subprocess.run(
        [*prefix, "ip", "-batch", "-"], input="\n".join(lines), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if ran.returncode:
        raise OSError(f"ip: {ran.stderr.strip()}")
