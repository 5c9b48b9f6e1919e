"""What an experiment says of its pipeline; how many stages there are is the mesh's."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.files.stores import store_violations
from jaxtrain.pipeline.schedule import KINDS, Schedule, make_schedule, nearest_kind
from jaxtrain.pipeline.table_file import read_schedule
from jaxtrain.violations import raise_violations

SAVES = ("inputs", "residuals")


@dataclass(frozen=True)
class Pipeline:
    """How a mesh's `stage` axis is used; without one it says nothing.

    schedule: one of `schedule.KINDS`, or the path of a table file (`table_file.py`), which ends in
      .csv or .txt. chunks: of each stage; those of a file are its own.
    save: what a stage keeps of F until B. "inputs": its input alone, and B runs the stage forward
      again; "residuals": what the remat policy of `execution.loop` saves in each layer, never
      weights.

    Of `execution.loop`, `prefetch` acts in no schedule that has W, `reshard_after_forward=False`
    neither there nor where residuals are saved.
    """

    schedule: str = "one_f_one_b"
    chunks: int = 1
    save: str = "inputs"

    def __post_init__(self) -> None:
        found = []
        if not isinstance(self.schedule, str) or not (self.of_file or self.schedule in KINDS):
            near = nearest_kind(self.schedule)
            found.append(
                f"schedule={self.schedule!r} is neither a schedule nor a .csv or .txt file{near}"
            )
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1:
            found.append(f"chunks={self.chunks!r} must be a whole number of at least 1")
        if self.save not in SAVES:
            found.append(f"save={self.save!r} must be one of {', '.join(SAVES)}")
        raise_violations(found + store_violations("schedule", self.schedule), "pipeline")

    @property
    def of_file(self) -> bool:
        return self.schedule.endswith((".csv", ".txt"))

    @property
    def keeps_residuals(self) -> bool:
        return self.save == "residuals"

    def table(self, *, stages: int, microbatches: int) -> Schedule:
        """The schedule on a mesh. Raises ValueError as `make_schedule` and `read_schedule` do, and
        for a file of other stages or microbatches; OSError where it is not there."""
        if not self.of_file:
            return make_schedule(self.schedule, stages, microbatches, self.chunks)
        found = read_schedule(self.schedule)
        due = {"stages": stages, "microbatches": microbatches}
        if self.chunks != 1:
            due["chunks"] = self.chunks
        wrong = [
            f"the table has {name}={getattr(found, name)} and this run has {value}"
            for name, value in due.items()
            if getattr(found, name) != value
        ]
        raise_violations(wrong, self.schedule)
        return found
