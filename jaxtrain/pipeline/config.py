"""Pipeline settings of an experiment; the mesh sets the number of stages."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.files.stores import store_violations
from jaxtrain.pipeline.schedule import KINDS, Schedule, make_schedule, nearest_kind
from jaxtrain.pipeline.table_file import read_schedule
from jaxtrain.reprs import short_repr
from jaxtrain.violations import raise_violations

SAVES = ("inputs", "residuals")


@dataclass(frozen=True)
class Pipeline:
    """Use of a mesh's `stage` axis; ignored without one.

    schedule: one of `schedule.KINDS`, or the path of a table file (`table_file.py`), which ends in
      .csv or .txt. chunks: of each stage; a file states its own.
    save: values of F that a stage keeps for B. "inputs": its input alone, and B runs the stage
      forward again; "residuals": the values that the remat policy of `execution.loop` saves in
      each layer, never weights.

    Of `execution.loop`, schedules with W ignore `prefetch` and `reshard_after_forward=False`; the
    latter is also ignored where residuals are saved.
    """

    schedule: str = "one_f_one_b"
    chunks: int = 1
    save: str = "inputs"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        violations = []
        if not isinstance(self.schedule, str) or not (self.of_file or self.schedule in KINDS):
            near = nearest_kind(self.schedule)
            violations.append(
                f"schedule={self.schedule!r} is neither a schedule nor a .csv or .txt file{near}"
            )
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1:
            violations.append(f"chunks={self.chunks!r} must be a whole number of at least 1")
        if self.save not in SAVES:
            violations.append(f"save={self.save!r} must be one of {', '.join(SAVES)}")
        raise_violations(violations + store_violations("schedule", self.schedule), "pipeline")

    @property
    def of_file(self) -> bool:
        return self.schedule.endswith((".csv", ".txt"))

    @property
    def keeps_residuals(self) -> bool:
        return self.save == "residuals"

    def table(self, *, stages: int, microbatches: int) -> Schedule:
        """Returns the schedule on a mesh. Raises ValueError as `make_schedule` and `read_schedule`,
        and for a file with other stages or microbatches; OSError if the file is missing."""
        if not self.of_file:
            return make_schedule(self.schedule, stages, microbatches, self.chunks)
        schedule = read_schedule(self.schedule)
        expected = {"stages": stages, "microbatches": microbatches}
        if self.chunks != 1:
            expected["chunks"] = self.chunks
        wrong = [
            f"the table has {name}={getattr(schedule, name)} and this run has {value}"
            for name, value in expected.items()
            if getattr(schedule, name) != value
        ]
        raise_violations(wrong, self.schedule)
        return schedule
