"""A checkpoint of a state on the device: the time that a save blocks the loop, and the next
step's."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from jaxtrain.bench.checkpoint import WAYS, one_round, state_of
from jaxtrain.bench_gpu.setting import Setting, Skipped

STEPS = 3
"""Saves that must fit on the disk: the previous one is removed when the next is written."""


def measure(setting: Setting, _: str) -> None:
    """Reports the first save, which imports its library, and a later one."""
    size, free = setting.sizes.saved, shutil.disk_usage(setting.out).free
    if free < STEPS * size:
        raise Skipped(
            f"it writes {STEPS * size:,} bytes below {setting.out}, which has {free:,} free"
        )
    with tempfile.TemporaryDirectory(dir=setting.out, prefix="save-") as name:
        way, state = WAYS["jaxtrain"](Path(name) / "saves"), state_of(size)
        for step, row in enumerate(("first save", "later save"), 1):
            state, times = one_round(way, step, state, Path(name))
            setting.tell(
                {"row": row, "gb": size / 1e9, **{f"{k}_s": v for k, v in vars(times).items()}}
            )
        way.close()
