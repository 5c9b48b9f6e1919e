"""The host's memory, in which arrays of a device may rest: JAX calls it a memory kind."""

from __future__ import annotations

DEVICE = "device"
HOST = "pinned_host"
"""Pages that are never swapped out, so that a device reads and writes them by itself."""
