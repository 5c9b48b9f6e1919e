"""Work of all processes with collectives within it, which fails on all where it fails on one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax

from jaxtrain.cluster.agreement import all_gather_results

T = TypeVar("T")


def in_step(act: Callable[[Callable[[str], None]], T], unequal: str) -> T:
    """Returns `act(meet)`. All processes call it; `act` calls `meet` with a text before each of its
    collectives. Raises ValueError(unequal) on all where texts differ, or some meet more often; an
    error on one is raised on all where they meet next, as by `share_failure`."""
    shared: list[Exception] = []

    def gather(text_of: Callable[[], str | None]) -> None:
        if shared:  # `act` went on after it
            raise shared[0]
        try:
            if len({*all_gather_results(text_of)}) > 1:
                raise ValueError(unequal)
        except Exception as error:
            shared.append(error)
            raise

    def fail(error: Exception) -> None:
        raise error

    try:
        result = act(lambda text: gather(lambda: text))
    except jax.errors.JaxRuntimeError:  # of a collective: the others do not come to meet
        raise
    except Exception as error:
        if not shared:  # the others know nothing of it
            gather(partial(fail, error))
        raise
    gather(lambda: None)
    return result
