"""What the backward pass finds saved and what it computes again: rematerialisation by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import jax
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import Offloadable, checkpoint_name

from jaxtrain.mesh.host_memory import DEVICE, HOST

P = ParamSpec("P")
T = TypeVar("T")
ATTENTION = ("attention_out", "attention_lse")
"""Names under which attention kernels keep what their backward pass needs."""
INPUT = "block_input"
"""The name of what a body begins with."""
PRODUCT = "quantized_product"
"""The name of the outputs of products in 8 bits, into which policies do not look."""

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
weights, `attention` only what the attention kernel returned (Chen et al. 2016; Korthikanti et al.
2022). The products of a mixture's experts are saved by `none` alone, and under gspmd by none of
these: elsewhere the backward pass makes them again."""

OFFLOAD: dict[str, Callable[..., bool]] = {
    "input": policies.save_only_these_names(INPUT),
    "attention": _BY_KERNELS,
    "dots": _DOTS,
}
"""What of the saved values may lie in the host's memory until the backward pass reads it: a block's
input, which every policy but `none` saves, and what the policies of these names do (Rajbhandari et
al. 2020, section 5.1)."""


def remat(function: Callable[P, T], name: str, offload: tuple[str, ...] = ()) -> Callable[P, T]:
    """`function` under the policy of that name; of what it saves `offload` lies in the host's
    memory. Raises ValueError as `remat_violations` has it."""
    if found := remat_violations(name, offload):
        raise ValueError("; ".join(found))
    policy = _offloading(name, offload) if offload else REMAT[name]
    return function if policy is None else jax.checkpoint(function, policy=policy)


def named_input(x: jax.Array) -> jax.Array:
    """x, under the name by which it may be offloaded."""
    return checkpoint_name(x, INPUT)


def remat_violations(name: str, offload: tuple[str, ...]) -> list[str]:
    """What is wrong with a policy's name, and with what is to be offloaded under it."""
    if name not in REMAT:
        return [f"remat={name!r} is unknown; the policies are {', '.join(REMAT)}"]
    unknown = [each for each in offload if each not in OFFLOAD]
    if unknown:
        return [f"offload has {unknown[0]!r}; what can be offloaded is {', '.join(OFFLOAD)}"]
    if offload and name == "none":
        return [
            f"remat='none' saves values that have no names, and offload={offload} goes by "
            "names; use remat='dots_and_attention', or offload=()"
        ]
    idle = [each for each in offload if each != "input" and each not in name.split("_and_")]
    return [
        f"offload has {each!r}, which remat={name!r} does not save; use remat="
        f"{_saving(name, each)!r}, or take it out"
        for each in idle
    ]


def _saving(name: str, also: str) -> str:
    """The policy that saves what `name` does and `also`."""
    return also if name == "full" else "dots_and_attention"


@lru_cache
def _offloading(name: str, offload: tuple[str, ...]) -> Callable[..., Any]:
    """What the policy of that name saves, in the host's memory where one of `offload` is it."""
    saved, moved = REMAT[name], [OFFLOAD[each] for each in offload]
    assert saved is not None, "nothing is offloaded of what has no name"

    def choose(*operation: Any, **given: Any) -> Any:
        if any(each(*operation, **given) for each in moved):
            return Offloadable(src=DEVICE, dst=HOST)
        return saved(*operation, **given)

    return choose
