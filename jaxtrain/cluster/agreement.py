"""What processes tell each other beside the training: small texts, gathered within a bound of time.

They travel through the key-value store of JAX's coordination service, so a process that is stuck in
a step is named instead of waited for, and no device takes part.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax

WAIT_S = 7200.0
"""How long one process waits for the others where nothing else is said: they may be tokenising."""

GATHERED = "jaxtrain/gather"

T = TypeVar("T")

_rounds = itertools.count()


class MissingProcesses(RuntimeError):
    """Not all processes came within the time: `missing` has the numbers of those that did not."""

    def __init__(self, what: str, missing: list[int], within_s: float) -> None:
        self.missing = missing
        names = ", ".join(map(str, missing)) or "unknown"
        super().__init__(
            f"{what}: waited {within_s:g} s for process {names} of {jax.process_count()}; look at "
            "what it last said, end all processes and start them again"
        )


def coordination() -> Any:
    """The client of JAX's coordination service. Raises RuntimeError where there is none."""
    from jax._src import distributed  # no public way leads to it

    if distributed.global_state.client is None:
        raise RuntimeError(
            f"{jax.process_count()} processes without JAX's coordination service; call "
            "jax.distributed.initialize() in each before anything else of JAX"
        )
    return distributed.global_state.client


def all_gather_text(text: str, *, within_s: float = WAIT_S) -> list[str]:
    """The text of every process, in their order. All of them call it, for the same thing, in the
    same order. Raises MissingProcesses after `within_s` seconds."""
    if jax.process_count() == 1:
        return [text]
    number = next(_rounds)
    found = gather_under(f"{GATHERED}/{number}", text, within_s=within_s)
    if number and jax.process_index() == 0:  # all have read the round before: they are in this one
        coordination().key_value_delete(f"{GATHERED}/{number - 1}")
    return found


def gather_under(key: str, text: str, *, within_s: float) -> list[str]:
    """As `all_gather_text`, under a key that no other call has."""
    client, count = coordination(), jax.process_count()
    client.key_value_set(f"{key}/{jax.process_index()}", "=" + text)
    late: Exception | None = None
    try:
        client.wait_at_barrier(key, int(within_s * 1000))
    except Exception as error:  # JAX's class for it differs from version to version
        late = error
    told = dict(client.key_value_dir_get(key))
    found = {int(name.rpartition("/")[2]): value[1:] for name, value in told.items()}
    if late is not None:
        missing = sorted(set(range(count)) - set(found))
        raise MissingProcesses("a meeting of all processes", missing, within_s) from late
    return [found[index] for index in range(count)]


def all_gather_union(items: list[T]) -> list[T]:
    """The items (JSON) of all processes, each once. All of them call it."""
    found = (item for told in all_gather_text(json.dumps(items)) for item in json.loads(told))
    return list(dict.fromkeys(found))


def share_oserror(act: Callable[[], T]) -> T:
    """What `act` gives; OSError on every process where it fails on one. All of them call it."""
    if jax.process_count() == 1:
        return act()
    found: Any = None
    problem = ""
    try:
        found = act()
    except OSError as error:
        problem = str(error)
    problems = [f"process {i}: {p}" for i, p in enumerate(all_gather_text(problem)) if p]
    if problems:
        raise OSError("; ".join(problems))
    return found


def share_failure(act: Callable[[], T]) -> T:
    """What `act` gives; where it raises OSError or ValueError on one process that is raised there,
    and ValueError with its words on all others. All of them call it."""
    found: Any = None
    mine: Exception | None = None
    try:
        found = act()
    except (OSError, ValueError) as error:
        mine = error
    told = all_gather_text("" if mine is None else str(mine))
    if mine is not None:
        raise mine
    if problems := [f"process {i}: {said}" for i, said in enumerate(told) if said]:
        raise ValueError("; ".join(problems))
    return found
