"""Faults of the state: what a chip that computes or keeps wrongly does to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.run.session import Session
from jaxtrain.step.state import TrainState

TURNED = -4.0
"""What parameters are multiplied by, so that the loss jumps and stays up for a while."""


def change_state(kind: str, session: Session) -> None:
    """ "flip", "spike": now. "wrong", "nan": in the next step, once."""
    if kind == "flip":
        session.state = flipped(session.state)
    elif kind == "spike":
        turned = {name: leaf * TURNED for name, leaf in session.state.params.items()}
        session.state = replace(session.state, params=turned)
    elif kind == "wrong":
        _once(session, lambda program, state, batch: _wrong(program(state, batch)))
    else:
        _once(session, _not_finite, again=_not_finite)


def flipped(state: TrainState) -> TrainState:
    """With a bit of the first word of the first parameter changed on the first device of this
    process, and nowhere else. One in the middle: the lowest may be gone again when the next update
    is rounded."""
    name = min(state.params)
    leaf = state.params[name]
    parts = [shard.data for shard in leaf.addressable_shards]
    first = np.array(parts[0])
    size = first.dtype.itemsize
    words = first.reshape(-1).view(f"uint{8 * size}")
    words[0] ^= words.dtype.type(1 << 9 * size // 2)
    parts[0] = jax.device_put(first, next(iter(parts[0].devices())))
    made = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    return replace(state, params={**state.params, name: made})


def _wrong(found: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
    state, metrics = found
    return flipped(jax.block_until_ready(state)), metrics


def _not_finite(program: Any, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """Of parameters that are not numbers the gradients are none, and the step is skipped; the
    parameters are those before it."""
    kept = jax.tree.map(jnp.copy, state.params)
    name = min(state.params)
    spoiled = {**state.params, name: state.params[name] * jnp.nan}
    state, metrics = program(replace(state, params=spoiled), batch)
    return replace(state, params=kept), metrics


Act = Callable[[Any, TrainState, Any], Any]
"""What does a step, given the program of it, state and batch."""


def _plain(program: Any, state: TrainState, batch: Any) -> Any:
    return program(state, batch)


def _once(session: Session, act: Act, again: Act = _plain) -> None:
    """Have the next step done by `act`, and by `again` where it is taken a second time."""
    programs = dict(session.compiled)
    session.compiled.update(
        {which: _Faulty(session, programs, which, act, again) for which in programs}
    )


@dataclass(eq=False)
class _Faulty:
    """In the place of the compiled program `which` until it has run once; takes the same memory."""

    session: Session
    programs: dict[Any, Any]
    which: Any
    act: Act
    again: Act

    def __call__(self, state: TrainState, batch: Any) -> Any:
        program = self.programs[self.which]
        if self.session.compiled[self.which] is program:
            return self.again(program, state, batch)
        self.session.compiled.update(self.programs)
        return self.act(program, state, batch)

    def memory_analysis(self) -> Any:
        return self.programs[self.which].memory_analysis()
