"""Small texts gathered from all processes within a time limit.

They go through the key-value store of JAX's coordination service. So a process that is stuck in a
step is named instead of waited for, and no device takes part.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxtrain.violations import refuses

WAIT_S = 7200.0
"""Default seconds that a process waits for the others: they may be tokenising."""

GATHERED, SHARED = "jaxtrain/gather", "jaxtrain/share"

T = TypeVar("T")

_rounds = itertools.count()


class MissingProcesses(RuntimeError):
    """Not all processes arrived in time; `missing` has the numbers of the others."""

    def __init__(self, event: str, missing: list[int], within_s: float) -> None:
        self.missing = missing
        names = ", ".join(map(str, missing)) or "unknown"
        super().__init__(
            f"{event}: waited {within_s:g} s for process {names} of {jax.process_count()}; look at "
            "what it last said, end all processes and start them again"
        )


def coordination() -> Any:
    """Returns the client of JAX's coordination service. Raises RuntimeError if there is none."""
    from jax._src import distributed  # there is no public API

    if distributed.global_state.client is None:
        raise RuntimeError(
            f"{jax.process_count()} processes without JAX's coordination service; call "
            "jax.distributed.initialize() in each before anything else of JAX"
        )
    return distributed.global_state.client


def stated_processes() -> int | None:
    """Returns the number of processes of the run by this one's own settings; None for a process
    that is alone. JAX counts those that the service waits for, which may be of another run."""
    from jax._src import distributed  # there is no public API

    return distributed.global_state.num_processes


def all_gather_text(text: str, *, within_s: float = WAIT_S) -> list[str]:
    """Returns the text of every process, in their order. All processes call it, in the same order
    of calls. Raises MissingProcesses after `within_s` seconds."""
    if jax.process_count() == 1:
        return [text]
    number = next(_rounds)
    texts = gather_under(f"{GATHERED}/{number}", text, within_s=within_s)
    if number and jax.process_index() == 0:  # all have read the previous round
        coordination().key_value_delete(f"{GATHERED}/{number - 1}")
    return texts


def gather_under(key: str, text: str, *, within_s: float) -> list[str]:
    """Returns every process's text as `all_gather_text`; `key` is unique to the call."""
    client, count = coordination(), jax.process_count()
    client.key_value_set(f"{key}/{jax.process_index()}", "=" + text)
    late: Exception | None = None
    try:
        client.wait_at_barrier(key, int(within_s * 1000))
    except Exception as error:  # JAX's class for it differs from version to version
        late = error
    entries = dict(client.key_value_dir_get(key))
    texts = {int(name.rpartition("/")[2]): value[1:] for name, value in entries.items()}
    if late is not None:
        missing = sorted(set(range(count)) - set(texts))
        raise MissingProcesses("a meeting of all processes", missing, within_s) from late
    return [texts[index] for index in range(count)]


def all_gather_union(items: list[T]) -> list[T]:
    """Returns the items (JSON) of all processes, without duplicates. All of them call it."""
    merged = (item for text in all_gather_text(json.dumps(items)) for item in json.loads(text))
    return list(dict.fromkeys(merged))


class FailedTogether(RuntimeError):
    """An action of all processes failed on some, with an error that is not a refusal of input: it
    may pass."""


def share_failure(act: Callable[[], T], *, under: str = "") -> T:
    """Returns `act()`. If it fails on one process, all raise an error with the messages of all that
    failed: a ValueError if each is a refusal, else FailedTogether; but each its own where it is the
    same on all. All of them call it, in the same order; in a thread, beside other calls, with a key
    of `fresh_key`: under."""
    if jax.process_count() == 1:
        return act()
    result: Any = None

    def keep() -> None:
        nonlocal result
        result = act()

    all_gather_results(keep, under)
    return result


def fresh_key(previous: str = "") -> str:
    """Returns a key for `share_failure`, the same on every process. All of them call it. previous:
    a key that all have done with, whose texts are removed."""
    if previous and jax.process_count() > 1 and jax.process_index() == 0:
        coordination().key_value_delete(previous)
    return f"{SHARED}/{next(_rounds)}"


def from_first(act: Callable[[], T]) -> T:
    """Returns, on every process, what `act` returns on process 0, from JSON. Raises as
    `share_failure`. All of them call it."""
    if jax.process_count() == 1:
        return act()
    first = jax.process_index() == 0
    return all_gather_results(lambda: act() if first else None)[0]


def all_gather_results(act: Callable[[], Any], under: str = "") -> list[Any]:
    """Returns what `act` returns on each process, from JSON. Raises as `share_failure`, which has
    `under`. All of them call it."""
    own_error = None
    try:
        text = json.dumps({"result": act()})
    except Exception as error:  # of any type: the others wait for this process
        own_error = error
        text = json.dumps({"error": _message(error), "refuses": refuses(error)})
    texts = gather_under(under, text, within_s=WAIT_S) if under else all_gather_text(text)
    outcomes = [json.loads(gathered) for gathered in texts]
    errors = {i: outcome for i, outcome in enumerate(outcomes) if "error" in outcome}
    if not errors:
        return [outcome["result"] for outcome in outcomes]
    processes: dict[str, list[str]] = {}
    for process, outcome in errors.items():
        processes.setdefault(outcome["error"], []).append(str(process))
    messages = [f"process {', '.join(p)}: {message}" for message, p in processes.items()]
    refused = all(outcome["refuses"] for outcome in errors.values())
    try:
        if own_error is not None and len(processes) == 1 and len(errors) == len(outcomes):
            raise own_error
        raise (ValueError if refused else FailedTogether)("; ".join(messages)) from own_error
    finally:
        own_error = None  # its traceback has this frame


def _message(error: Exception) -> str:
    clear = isinstance(error, (OSError, ValueError, FailedTogether)) and str(error)
    return clear or f"{type(error).__name__}: {error}"
