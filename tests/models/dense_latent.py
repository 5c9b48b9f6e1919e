"""Multi-head latent attention in plain array operations, of NumPy (fp64) or of jax.numpy:
DeepSeek-V2 (2024), appendix C, one head after the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def turned(x: Any, positions: Any, theta: float, xp: Any) -> Any:
    """[rows, seq, dims]: pairs (i, i + dims / 2) turned by position * theta ** (-2i / dims)."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None] * (theta ** (-xp.arange(half) / half)).reshape(1, 1, -1)
    a, b = x[..., :half], x[..., half:]
    cos, sin = xp.cos(angle), xp.sin(angle)
    return xp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def normed(x: Any, scale: Any, eps: float, xp: Any) -> Any:
    return x / xp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale.reshape(1, 1, -1)


def latent_attention(c: Any, p: Any, x: Any, batch: Any, xp: Any = np) -> Any:
    """x [rows, seq, embed], normed, -> the branch's output. p: parameters by their names."""
    segments, positions = batch["segments"], batch["positions"]
    rows, seq, _ = x.shape
    eps, nope, value = c.norm.eps, c.nope_head_dim, c.value_head_dim
    down = x @ p["latent_down"]
    latent = normed(down[..., : c.latent], p["latent_norm.scale"], eps, xp)
    rope_key = turned(down[..., c.latent :], positions, c.rope.theta, xp)
    queried = x
    if c.query_latent is not None:
        queried = normed(x @ p["query_down"], p["query_norm.scale"], eps, xp)
    to_query = p["query" if c.query_latent is None else "query_up"]
    at = xp.arange(seq)
    seen = (at[:, None] >= at[None])[None] & (segments[:, :, None] == segments[:, None])
    size, outs = nope + c.rope_head_dim, []
    scale = size**-0.5 if c.scale is None else c.scale
    for head in range(c.heads):
        query = queried @ to_query[:, head * size : (head + 1) * size]
        up = p["latent_up"][:, head * (nope + value) : (head + 1) * (nope + value)]
        key, values = latent @ up[:, :nope], latent @ up[:, nope:]
        rope_query = turned(query[..., nope:], positions, c.rope.theta, xp)
        scores = query[..., :nope] @ key.swapaxes(1, 2) + rope_query @ rope_key.swapaxes(1, 2)
        scores = xp.where(seen, scores * scale, -xp.inf)
        weights = xp.exp(scores - scores.max(-1, keepdims=True))
        outs.append(weights / weights.sum(-1, keepdims=True) @ values)
    return xp.concatenate(outs, axis=-1).reshape(rows, seq, -1) @ p["out"]
