"""A decoder transformer in plain jax.numpy: the oracle of `test_decoder.py`.

Every layer in natural order, whole matrices, seq x seq scores, all logits at once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from dense_latent import latent_attention

from jaxtrain.nn.module import under
from jaxtrain.nn.norm import LayerNorm
from jaxtrain.transformer.latent import LatentAttentionConfig
from jaxtrain.transformer.mixture import MoeConfig


def normalise(config, p, x):
    if isinstance(config, LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.eps)
    scale = p["scale"] + 1 if getattr(config, "unit_offset", False) else p["scale"]
    y = y * scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return y + p["bias"].reshape((1,) * (x.ndim - 1) + (-1,)) if "bias" in p else y


def rope(x, positions, c):
    """Pairs (i, i + dims / 2) of the first dims as complex numbers, turned by position * frequency
    and stretched by the scaling's factor; frequencies are held to closed forms in test_rotary."""
    half = int(x.shape[-1] * c.partial_rotary_factor) // 2
    frequency = c.theta ** (-jnp.arange(half) / half)
    if c.scaling is not None:
        frequency = jnp.asarray(c.frequencies(x.shape[-1], x.shape[1]), jnp.float32)
    angle = positions[:, :, None] * frequency.reshape(1, 1, -1)
    z = (x[..., :half] + 1j * x[..., half : 2 * half]) * jnp.exp(1j * angle)[:, :, None]
    z = z * c.attention_scaling
    return jnp.concatenate([z.real, z.imag, x[..., 2 * half :]], -1)


def dense_attention(c, embed, p, x, batch):
    rows, seq, _ = x.shape
    project = lambda name: x @ p[name] + p.get(f"{name}_bias", jnp.zeros(1)).reshape(1, 1, -1)  # noqa: E731
    q, k, v = (project(n).reshape(rows, seq, -1, c.size(embed)) for n in ("query", "key", "value"))
    if c.qk_norm_across_heads:
        flat = lambda a: a.reshape(rows, seq, -1)  # noqa: E731
        q = normalise(c.qk_norm, under(p, "query_norm."), flat(q)).reshape(q.shape)
        k = normalise(c.qk_norm, under(p, "key_norm."), flat(k)).reshape(k.shape)
    elif c.qk_norm is not None:
        q = normalise(c.qk_norm, under(p, "query_norm."), q)
        k = normalise(c.qk_norm, under(p, "key_norm."), k)
    if c.rope is not None:
        q, k = (rope(a, batch["positions"], c.rope) for a in (q, k))
    at, segments = jnp.arange(seq), batch["segments"]
    seen = (at[:, None] >= at[None]) & (at[:, None] - at[None] < (c.window or seq))
    seen = (seen[None] & (segments[:, :, None] == segments[:, None]))[:, None]
    k, v = (jnp.repeat(a, c.heads // c.key_heads, axis=2) for a in (k, v))
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * (
        c.size(embed) ** -0.5 if c.scale is None else c.scale
    )
    s = s if c.softcap is None else c.softcap * jnp.tanh(s / c.softcap)
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, s, -jnp.inf), -1), v)
    out = o.reshape(rows, seq, -1) @ p["out"]
    return out + p.get("out_bias", jnp.zeros(1)).reshape(1, 1, -1)


def dense_mlp(c, p, x):
    add = lambda name, y: y + p.get(name, jnp.zeros(1)).reshape(1, 1, -1)  # noqa: E731
    up = add("up_bias", x @ p["up"])
    h = c.activation(add("gate_bias", x @ p["gate"])) * up if c.gated else c.activation(up)
    return add("down_bias", h @ p["down"])


def dense_experts(c, p, x):
    """Every expert of every token, weighted by its share: nothing for all but the k likeliest."""
    shares = jax.nn.softmax(x @ p["router"], -1)
    least = jnp.sort(shares, -1)[..., -c.experts_per_token, None]
    shares = jnp.where(shares >= least, shares, 0.0)
    shares = shares / shares.sum(-1, keepdims=True)
    h = c.activation(jnp.einsum("bsd,edh->besh", x, p["gate" if c.gated else "up"]))
    h = h * jnp.einsum("bsd,edh->besh", x, p["up"]) if c.gated else h
    return jnp.einsum("bse,besh,ehd->bsd", shares, h, p["down"])


def natural_layers(config, params):
    """Each layer's parameters in the order in which they are applied."""
    layers = [under(params, f"prefix.{i}.") for i in range(len(config.prefix))]
    for number in range(config.periods):
        for i in range(len(config.period)):
            layers.append({k: v[number] for k, v in under(params, f"period.{i}.").items()})
    return layers + [under(params, f"suffix.{i}.") for i in range(len(config.suffix))]


def dense_logits(config, params, batch):
    x = params["embedding"][batch["tokens"]] * config.embedding_scale
    if config.learned_positions is not None:
        x = x + params["positions"][batch["positions"]]
    for c, p in zip(config.blocks, natural_layers(config, params), strict=True):
        own = lambda norm, name, h, p=p: h if norm is None else normalise(norm, under(p, name), h)  # noqa: E731
        h = own(c.norm, "attention_norm.", x)
        leaves = under(p, "attention.")
        if isinstance(c.attention, LatentAttentionConfig):
            h = latent_attention(c.attention, leaves, h, batch, jnp)
        else:
            h = dense_attention(c.attention, config.embed, leaves, h, batch)
        x = x + c.residual_scale * own(c.post_norm, "attention_post_norm.", h)
        h = own(c.norm, "mlp_norm.", x)
        feed_forward = dense_experts if isinstance(c.mlp, MoeConfig) else dense_mlp
        h = feed_forward(c.mlp, under(p, "mlp."), h)
        x = x + c.residual_scale * own(c.post_norm, "mlp_post_norm.", h)
    x = normalise(config.norm, under(params, "norm."), x)
    head = params["embedding" if config.tied else "head"][: config.vocab]
    z = x @ head.T * config.logit_scale
    return (
        z
        if config.logit_softcap is None
        else config.logit_softcap * jnp.tanh(z / config.logit_softcap)
    )


def dense_loss(config, params, batch):
    log_p = jax.nn.log_softmax(dense_logits(config, params, batch), -1)
    chosen = jnp.take_along_axis(log_p, batch["targets"][:, :, None], -1)[:, :, 0]
    return -jnp.sum(chosen * batch["weights"])
