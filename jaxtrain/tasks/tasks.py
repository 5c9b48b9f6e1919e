"""The tasks that a model is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtrain.violations import count, raise_violations


@dataclass(frozen=True)
class Tasks:
    """Tasks of lm-evaluation-harness (the extra `eval`), by which a model is evaluated as text.

    names: of tasks, groups or tags, or patterns such as "arc_*". folder: has task files of your
      own. limit: documents of each task, None for all. examples: solved ones in a prompt, None for
      as many as a task says.
    """

    names: tuple[str, ...]
    folder: str | None = None
    limit: int | None = None
    examples: int | None = None

    def __post_init__(self) -> None:
        violations = [] if self.limit is None else count("limit", self.limit, 1)
        violations += [] if self.examples is None else count("examples", self.examples, 0)
        names = self.names
        if isinstance(names, str) or not isinstance(names, list | tuple) or not names:
            violations.append(f'names={names!r} must be names of tasks, such as ("hellaswag",)')
        else:
            violations += [f"names has {n!r}; give names" for n in names if type(n) is not str]
            object.__setattr__(self, "names", tuple(names))
        raise_violations(violations, "Tasks")
