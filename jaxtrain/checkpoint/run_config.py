"""A run directory's config.json: the experiment that made it, and a check that this is the same."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from jaxtrain.checkpoint.storage import committed_steps, describe, json_text
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.pointer import checkpoints_in, place_of
from jaxtrain.files.regular import replacing
from jaxtrain.files.store import AnyPath, exists, is_local, read_named

NAME = "config.json"
BRANCH = "branch"
"""The entry of config.json that says of which run's step a run is a branch."""
BEGUN_BY = "begun_by"
"""The entry of config.json with the text that was given as `fresh` when the run began."""
REFERENCE = "reference"
"""Folder of a run directory: losses in the model that the run began with."""
REFERENCE_KIND = "reference losses"
"""Kind of the array files in it."""


class Absent(enum.Enum):
    """Marks the value of a field that one side does not have."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
Completed = Callable[[dict[str, Any]], dict[str, Any]]


class FieldDifference(NamedTuple):
    """A field whose stored value is not the present one; either may be ABSENT."""

    path: str
    stored: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.path} was {_shown(self.stored)}, now {_shown(self.now)}"


def anew_in(run: AnyPath | None) -> str:
    """Returns the ways to begin another run in place of the one in a directory."""
    fresh = "by --fresh (fresh=True), which keeps this run beside it, or "
    can_move = run is None or is_local(checkpoints_in(run))
    return f"begin anew {fresh * can_move}in another --run-dir"


def write_config(run_dir: Path, config: dict[str, Any]) -> Path:
    """Write `config` as the run directory's config.json: whole, or not at all.

    Raises:
        ValueError: `config` is not JSON, or the directory cannot be written.
    """
    text = json_text(config, name=f"the configuration for {run_dir}", indent=2)
    path = run_dir / NAME
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(f"{text}\n".encode())
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {describe(error)}; give another --run-dir, or make room "
            "and permission there"
        ) from error
    return path


def read_config(run_dir: AnyPath) -> dict[str, Any] | None:
    """The stored configuration, or None where no run has been.

    Raises:
        ValueError: there is a config.json that is not a JSON object, or checkpoints without one:
            nobody can say whose they are.
    """
    path = run_dir / NAME
    if not exists(path):
        if steps := committed_steps(checkpoints_in(run_dir)):
            raise ValueError(
                f"{run_dir} holds checkpoints (newest: step {steps[-1]}) but no {NAME}, so it "
                f"cannot be told which experiment made them; put {NAME} back or use a new --run-dir"
            )
        return None
    try:
        config = parse_json(read_named(run_dir, NAME))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read: {describe(error)}; mend it or use a new --run-dir"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{path} holds a {type(config).__name__}, not an object; use a new --run-dir"
        )
    return config


def stored_experiment(run_dir: AnyPath) -> Any:
    """Returns the experiment in config.json as it is stored; None where no run has been. Raises as
    `read_config`."""
    return (read_config(run_dir) or {}).get("experiment")


def compare_config(
    run_dir: Path,
    config: dict[str, Any],
    *,
    ignore: tuple[str, ...] = ("steps",),
    completed: Completed = dict,
) -> list[FieldDifference]:
    """Returns the fields of `config` that differ from the stored ones, sorted by dotted path; []
    where no run has been. ignore, completed: as for `config_differences`."""
    stored = read_config(run_dir)
    if stored is None:
        return []
    label = f"the configuration for {run_dir}"
    return config_differences(stored, config, ignore=ignore, completed=completed, label=label)


def config_differences(
    stored: dict[str, Any],
    config: dict[str, Any],
    *,
    ignore: tuple[str, ...] = (),
    completed: Completed = dict,
    label: str = "the configuration",
) -> list[FieldDifference]:
    """Returns the fields of `config` that differ from `stored`, sorted by dotted path.

    ignore: fields, with all below them, that may change between two starts of a run; `*` stands for
    any one name or number in a path. completed: converts a stored configuration to today's fields.
    Both sides are compared as JSON: a tuple equals a list, and 1 equals 1.0. label: of `config` in
    the error if it is not JSON.
    """
    previous = _fields(completed(stored))
    current = _fields(json.loads(json_text(config, name=label)))
    differences = [
        FieldDifference(path, previous.get(path, ABSENT), current.get(path, ABSENT))
        for path in sorted(previous.keys() | current.keys())
        if not any(_is_below(path, name) for name in ignore)
    ]
    return [
        difference for difference in differences if not _same(difference.stored, difference.now)
    ]


def _is_below(path: str, name: str) -> bool:
    """True if a dotted path is `name`, or that of a field below it."""
    keys, names = path.split("."), name.split(".")
    return len(keys) >= len(names) and all(
        wanted in ("*", key) for wanted, key in zip(names, keys, strict=False)
    )


def refuse_other_experiment(
    run_dir: Path,
    config: dict[str, Any],
    *,
    ignore: tuple[str, ...] = ("steps",),
    completed: Completed = dict,
    why: str = "",
) -> None:
    """Raises ValueError, listing the fields, if the run directory is another experiment's. ignore,
    completed: as for `compare_config`. why: what is known of the difference."""
    differences = compare_config(run_dir, config, ignore=ignore, completed=completed)
    if differences:
        branch = ""
        if committed_steps(checkpoints_in(run_dir)):
            here = is_local(checkpoints_in(run_dir))
            source, name = (run_dir, "--name") if here else (place_of(run_dir), "--run-dir")
            branch = (
                "; a branch has its model and state, and may change the rest: "
                f"--from {source}[@STEP] {name} NEW"
            )
        raise ValueError(
            f"run directory {run_dir} holds another experiment: "
            + "; ".join(map(str, differences))
            + (f" ({why})" if why else "")
            + f"; set {'it' if len(differences) == 1 else 'them'} back, or "
            + f"{anew_in(run_dir)}{branch}"
        )


def _fields(value: object, path: str = "") -> dict[str, Any]:
    """Returns the leaves of nested JSON by dotted paths; an empty container is a leaf."""
    if not isinstance(value, dict | list) or (not value and path):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    leaves: dict[str, Any] = {}
    for key, child in items:
        leaves |= _fields(child, f"{path}.{key}" if path else str(key))
    return leaves


def _same(stored: object, now: object) -> bool:
    if ABSENT in (stored, now):
        return False
    # The text too: not-a-number equals itself here.
    return stored == now or json.dumps(stored) == json.dumps(now)


def _shown(value: object) -> str:
    return value.value if isinstance(value, Absent) else json.dumps(value)
