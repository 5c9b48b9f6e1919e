"""Names of a run's saved step: RUN or RUN@STEP."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.files.stored_run import opened_for_reading
from jaxtrain.files.stores import is_address

FORM = "RUN or RUN@STEP, a run directory or its address and the number of a step saved there"


def run_and_step(text: str | Path, step: int | None = None) -> tuple[Path, int | None]:
    """Returns the directory of RUN or RUN@STEP, and the step, None if none is given. step: the
    same, given apart. Raises ValueError for what is neither, and for two different steps."""
    if not isinstance(text, str | Path) or not str(text):
        raise ValueError(f"{text!r} is no run; give {FORM}")
    path, at, number = str(text).rpartition("@")
    if not at or Path(text).exists() or (is_address(text) and not number.isdecimal()):
        return opened_for_reading("run", text), step
    if not number.isdecimal():
        raise ValueError(f"{text} is no directory, and has no step behind the @; give {FORM}")
    if step not in (None, int(number)):
        raise ValueError(f"{text} names another step than step={step}; give one of them")
    return opened_for_reading("run", path), int(number)
