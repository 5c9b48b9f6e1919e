"""The loss of a user's own nnx.Module: its state is passed through, its results are checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.arrays import Leaves
from jaxtrain.losses.cross_entropy import LossSums
from jaxtrain.nn.module import put_together, take_apart
from jaxtrain.validation.model import taken_names
from jaxtrain.violations import raise_violations


def own_loss(static: Any, *, compute: Any) -> Callable[..., tuple[LossSums, Leaves]]:
    """(params, state, microbatch, key or None) -> (LossSums, updated state).

    Parameters are cast to `compute`; their gradients have the parameters' own dtype. All other
    state (BatchStat, RngState, ...) keeps its own. The module runs as it was built. With key=None
    (held-out data) it is a copy after `eval()`, so that BatchNorm reads its running averages and
    Dropout drops nothing. Law: the loss is a function of the four arguments.

    Raises ValueError for a field that the loss reads and a batch does not have, for a loss that is
    not two scalars, and for state that appears, vanishes or changes its shape.
    """

    def loss(params: Leaves, state: Leaves, batch: Leaves, key: Any) -> tuple[LossSums, Leaves]:
        used = {name: value.astype(compute) for name, value in params.items()}

        def built() -> Any:
            model = put_together(static, {**used, **state})
            if key is None:
                model.eval()
            return model

        model = built()
        try:
            result = model.loss(batch, key=key)
        except KeyError:
            _refuse_lacking(built(), batch, key)
            raise
        sums = _sums(model, result)
        updated = take_apart(model).model_state
        _refuse_other_state(state, updated)
        return sums, updated

    return loss


class _Lacking(KeyError):
    """A field that was read from a batch that does not have it."""


class _Fields(dict[str, Any]):
    """A batch that distinguishes its own missing fields from the keys of every other dict."""

    def __missing__(self, name: str) -> Any:
        raise _Lacking(name)


jax.tree_util.register_pytree_node(
    _Fields,
    lambda batch: ([batch[name] for name in sorted(batch)], tuple(sorted(batch))),
    lambda names, values: _Fields(zip(names, values, strict=True)),
)


def _refuse_lacking(model: Any, batch: Leaves, key: Any) -> None:
    """Raises ValueError if the loss fails for a field of the batch, not for a key of the user's
    own. The loss is traced once more for that: batches are plain dicts otherwise, as `jax.tree.map`
    and `in_axes` with other trees need them."""
    try:
        model.loss(_Fields(batch), key=key)
    except _Lacking as error:
        raise ValueError(
            f"{type(model).__name__}.loss reads {error.args[0]!r}, and a batch of this data has "
            f"{', '.join(batch)}; give the rows of the data that field, or do without it in loss()"
        ) from error
    except Exception:  # the loss's own: its first error is raised
        return


def _sums(model: Any, result: Any) -> LossSums:
    """Checks a loss's result and returns it in fp32."""
    name = type(model).__name__
    if not isinstance(result, tuple) or len(result) not in (2, 3):
        raise ValueError(
            f"{name}.loss returned {type(result).__name__}; return (sum, count): the loss summed "
            f"over what it counts, and the count it is divided by at the end of the step; and a "
            f"third, if you like: a dict of other sums, such as that of what was right"
        )
    extra = result[2] if len(result) == 3 else {}
    if not isinstance(extra, dict) or not all(isinstance(k, str) for k in extra):
        raise ValueError(
            f"{name}.loss returned {type(extra).__name__} as its third value; return a dict of "
            f'sums by name, such as {{"accuracy": ...}}'
        )
    raise_violations(taken_names(extra), f"{name}.loss")
    shapes = [jnp.shape(value) for value in result[:2]]
    if shapes != [(), ()]:
        raise ValueError(
            f"{name}.loss returned shapes {shapes[0]} and {shapes[1]}; return two scalars, "
            f"sums over the rows of the batch"
        )
    if arrays := [f"{k}{list(jnp.shape(v))}" for k, v in extra.items() if jnp.shape(v) != ()]:
        raise ValueError(f"{name}.loss returned {', '.join(arrays)} beside it; return scalars")
    return jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), LossSums(*result))


def _refuse_other_state(prior: Leaves, updated: Leaves) -> None:
    """Raises ValueError unless a step returns the leaves that it got: else it could not repeat."""
    kinds = [{k: (jnp.shape(v), v.dtype) for k, v in state.items()} for state in (prior, updated)]
    violations = []
    for name in sorted({*prior, *updated}):
        old, new = (kind.get(name) for kind in kinds)
        if old is None:
            violations.append(f"state {name} appears in loss(); create it when the module is built")
        elif new is None:
            violations.append(f"state {name} is gone after loss(); keep it")
        elif old != new:
            violations.append(
                f"state {name} was {old[1]}{list(old[0])} and is {new[1]}{list(new[0])} after "
                f"loss(); keep its shape and dtype"
            )
    if violations:
        raise ValueError("\n".join(violations))
