"""Faults of the state, as from a chip that computes or stores wrongly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.session.session import Session
from jaxtrain.step.state import TrainState

TURNED = -4.0
"""Factor of the parameters: the loss jumps and stays high for a while."""


def change_state(kind: str, session: Session) -> None:
    """Applies "flip" and "spike" now, "wrong" and "nan" in the next step, once."""
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
    """The state with one bit changed in the first word of the first parameter, only on this
    process's first device. A bit in the middle: rounding in the next update could undo the lowest
    one."""
    name = min(state.params)
    leaf = state.params[name]
    parts = [shard.data for shard in leaf.addressable_shards]
    first = np.array(parts[0])
    size = first.dtype.itemsize
    words = first.reshape(-1).view(f"uint{8 * size}")
    words[0] ^= words.dtype.type(1 << 9 * size // 2)
    parts[0] = jax.device_put(first, next(iter(parts[0].devices())))
    changed = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
    return replace(state, params={**state.params, name: changed})


def _wrong(result: tuple[TrainState, Any]) -> tuple[TrainState, Any]:
    state, metrics = result
    return flipped(jax.block_until_ready(state)), metrics


def _not_finite(program: Any, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """A step on parameters that are NaN: its gradients are NaN, so it is skipped. The parameters
    are restored afterwards."""
    previous = jax.tree.map(jnp.copy, state.params)
    name = min(state.params)
    spoiled = {**state.params, name: state.params[name] * jnp.nan}
    state, metrics = program(replace(state, params=spoiled), batch)
    return replace(state, params=previous), metrics


Act = Callable[[Any, TrainState, Any], Any]
"""Runs a step: (program, state, batch) -> result."""


def _plain(program: Any, state: TrainState, batch: Any) -> Any:
    return program(state, batch)


def _once(session: Session, act: Act, again: Act = _plain) -> None:
    """Runs the next step by `act`; if it is repeated, by `again`."""
    programs = dict(session.compiled)
    session.compiled.update({key: _Faulty(session, programs, key, act, again) for key in programs})


@dataclass(eq=False)
class _Faulty:
    """Replaces the compiled program `key` until it has run once; needs the same memory."""

    session: Session
    programs: dict[Any, Any]
    key: Any
    act: Act
    again: Act

    def __call__(self, state: TrainState, batch: Any) -> Any:
        program = self.programs[self.key]
        if self.session.compiled[self.key] is program:
            return self.again(program, state, batch)
        self.session.compiled.update(self.programs)
        return self.act(program, state, batch)

    def memory_analysis(self) -> Any:
        return self.programs[self.key].memory_analysis()
