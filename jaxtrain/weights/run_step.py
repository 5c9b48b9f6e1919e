"""Names of a run's saved step: RUN or RUN@STEP."""

from __future__ import annotations

from pathlib import Path

from jaxtrain.files.stores import local_path

FORM = "RUN or RUN@STEP, a run directory and the number of a step saved there"


def run_and_step(text: str | Path, step: int | None = None) -> tuple[Path, int | None]:
    """Returns the directory of RUN or RUN@STEP, and the step, None if none is given. step: the
    same, given apart. Raises ValueError for what is neither, and for two different steps."""
    if not isinstance(text, str | Path) or not str(text):
        raise ValueError(f"{text!r} is no run; give {FORM}")
    path, at, number = str(text).rpartition("@")
    if not at or Path(text).exists():
        return local_path("run", text), step
    if not number.isdecimal():
        raise ValueError(f"{text} is no directory, and has no step behind the @; give {FORM}")
    if step not in (None, int(number)):
        raise ValueError(f"{text} names another step than step={step}; give one of them")
    return local_path("run", path), int(number)
