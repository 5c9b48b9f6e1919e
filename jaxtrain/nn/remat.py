"""Rematerialisation by name: values that are saved for the backward pass, or recomputed in it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, ParamSpec, TypeVar

import jax
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import Offloadable, checkpoint_name

from jaxtrain.mesh.host_memory import DEVICE, HOST
from jaxtrain.quantization.recipe import PRODUCT

P = ParamSpec("P")
T = TypeVar("T")
ATTENTION = ("attention_out", "attention_lse")
"""Names of the values that attention kernels save for their backward pass."""
INPUT = "block_input"
"""Name of a body's input."""

_BY_KERNELS: Callable[..., bool] = policies.save_only_these_names(*ATTENTION)
_DOTS: Callable[..., bool] = policies.save_from_both_policies(
    policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(PRODUCT)
)

REMAT: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "full": policies.nothing_saveable,
    "attention": _BY_KERNELS,
    "dots": _DOTS,
    "dots_and_attention": policies.save_from_both_policies(_DOTS, _BY_KERNELS),
}
"""`none` saves every intermediate, `full` only a block's input, `dots` also the products with
weights, `attention` only the attention kernel's results (Chen et al. 2016; Korthikanti et al.
2022). The products of a mixture's experts are saved by `none` alone, and under gspmd by none of
these: the backward pass recomputes them."""

OFFLOAD: dict[str, Callable[..., bool]] = {
    "input": policies.save_only_these_names(INPUT),
    "attention": _BY_KERNELS,
    "dots": _DOTS,
}
"""Saved values that may lie in the host's memory until the backward pass reads them: a block's
input, which every policy but `none` saves, and the values that the policies of these names save
(Rajbhandari et al. 2020, section 5.1)."""


def remat(function: Callable[P, T], name: str, offload: tuple[str, ...] = ()) -> Callable[P, T]:
    """Returns `function` under the policy of that name; the saved values in `offload` lie in the
    host's memory. Raises ValueError on `remat_violations`."""
    if violations := remat_violations(name, offload):
        raise ValueError("; ".join(violations))
    policy = _offloading(name, offload) if offload else REMAT[name]
    return function if policy is None else jax.checkpoint(function, policy=policy)


def named_input(x: T) -> T:
    """x, a tree of arrays, under the name by which it may be offloaded."""
    return jax.tree.map(partial(checkpoint_name, name=INPUT), x)


def remat_violations(name: str, offload: tuple[str, ...]) -> list[str]:
    """Violations in a policy's name and in the values to offload under it."""
    if name not in REMAT:
        return [f"remat={name!r} is unknown; the policies are {', '.join(REMAT)}"]
    unknown = [value for value in offload if value not in OFFLOAD]
    if unknown:
        return [f"offload has {unknown[0]!r}; what can be offloaded is {', '.join(OFFLOAD)}"]
    if offload and name == "none":
        return [
            f"remat='none' saves values that have no names, and offload={offload} goes by "
            "names; use remat='dots_and_attention', or offload=()"
        ]
    idle = [value for value in offload if value != "input" and value not in name.split("_and_")]
    return [
        f"offload has {value!r}, which remat={name!r} does not save; use remat="
        f"{_saving(name, value)!r}, or take it out"
        for value in idle
    ]


def _saving(name: str, also: str) -> str:
    """Name of the policy that saves the values of `name` and of `also`."""
    return also if name == "full" else "dots_and_attention"


@lru_cache
def _offloading(name: str, offload: tuple[str, ...]) -> Callable[..., Any]:
    """Policy that saves the values of that name, those of `offload` in the host's memory."""
    saved, moved = REMAT[name], [OFFLOAD[value] for value in offload]
    assert saved is not None, "nothing is offloaded of what has no name"

    def choose(*operation: Any, **options: Any) -> Any:
        if any(policy(*operation, **options) for policy in moved):
            return Offloadable(src=DEVICE, dst=HOST)
        return saved(*operation, **options)

    return choose
