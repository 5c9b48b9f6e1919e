"""What the backward pass finds saved and what it computes again: rematerialisation by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
from jax import checkpoint_policies as policies

P = ParamSpec("P")
T = TypeVar("T")
ATTENTION = ("attention_out", "attention_lse")
"""Names under which attention kernels keep what their backward pass needs."""

REMAT: dict[str, Callable[..., bool] | None] = {
    "none": None,
    "full": policies.nothing_saveable,
    "attention": policies.save_only_these_names(*ATTENTION),
    "dots": policies.dots_with_no_batch_dims_saveable,
    "dots_and_attention": policies.save_from_both_policies(
        policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(*ATTENTION)
    ),
}
"""`none` saves every intermediate, `full` only a block's input, `dots` also the products with
weights, `attention` only what the attention kernel returned (Chen et al. 2016; Korthikanti et al.
2022). The products of a mixture's experts are saved by `none` alone, and under gspmd by none of
these: elsewhere the backward pass makes them again."""


def remat(function: Callable[P, T], name: str) -> Callable[P, T]:
    """`function` under the policy of that name; raises ValueError on an unknown one."""
    if name not in REMAT:
        raise ValueError(f"remat={name!r} is unknown; the policies are {', '.join(REMAT)}")
    policy = REMAT[name]
    return function if policy is None else jax.checkpoint(function, policy=policy)
