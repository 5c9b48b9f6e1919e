"""The decoder against a dense transformer written out below in plain jax.numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxtrain.mesh.sharding import ShardingRules, fsdp, table, tensor
from jaxtrain.models.block import (
    AttentionConfig,
    BlockConfig,
    MlpConfig,
    gelu_exact,
    gelu_tanh,
)
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.nn.communicator import Local
from jaxtrain.nn.module import build, put_together, take_apart, under
from jaxtrain.nn.norm import LayerNorm, RMSNorm
from jaxtrain.nn.param import Initialisation
from jaxtrain.nn.rotary import Rope
from jaxtrain.nn.stack import LayerLoop

ROWS, SEQ, VOCAB = 2, 8, 13


def decoder(*period, layers=2, **fields):
    return DecoderConfig(
        **{"vocab": VOCAB, "embed": 8, "layers": layers, "period": period, "vocab_multiple": 8,
           "chunk_tokens": 8, **fields}
    )  # fmt: skip


NORM = RMSNorm()


def block(heads=4, hidden=12, *, mlp=None, norm=NORM, residual_scale=1.0, dropout=0.0, **fields):
    mlp = mlp or MlpConfig(hidden)
    return BlockConfig(AttentionConfig(heads, **fields), mlp, norm, residual_scale, dropout)


BIASED = {"qkv_bias": True, "out_bias": True}
GPT2_BLOCK = block(
    rope=None, mlp=MlpConfig(12, gelu_tanh, gated=False, bias=True), norm=LayerNorm(), **BIASED
)
MODELS = {
    "llama": decoder(block(kv_heads=2)),
    "gpt2": decoder(GPT2_BLOCK, norm=LayerNorm(), learned_positions=SEQ, tied=True),
    "qwen2": decoder(block(kv_heads=1, qkv_bias=True, rope=Rope(theta=1e3)), tied=True),
    "qwen3": decoder(block(kv_heads=2, head_dim=6, qk_norm=RMSNorm())),
    "mistral": decoder(block(kv_heads=2, window=3, mlp=MlpConfig(12, bias=True))),
    "gemma2": decoder(
        block(head_dim=4, softcap=2.0, scale=0.7, window=3, norm=RMSNorm(unit_offset=True)),
        block(head_dim=4, softcap=2.0, scale=0.7, mlp=MlpConfig(10, gelu_exact)),
        layers=4, tied=True, embedding_scale=8**0.5, logit_softcap=3.0,
        norm=RMSNorm(unit_offset=True),
    ),
    "granite": decoder(block(residual_scale=0.3), embedding_scale=3.0, logit_scale=0.25),
    "prefix and suffix": decoder(
        block(window=2, rope=Rope(theta=100.0)), block(hidden=16),
        layers=7, prefix=(block(hidden=4),), suffix=(block(heads=2, head_dim=2), block(window=4)),
    ),
}  # fmt: skip


def normalise(config, p, x):
    if isinstance(config, LayerNorm):
        x = x - x.mean(-1, keepdims=True)
    y = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.eps)
    scale = p["scale"] + 1 if getattr(config, "unit_offset", False) else p["scale"]
    y = y * scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return y + p["bias"].reshape((1,) * (x.ndim - 1) + (-1,)) if "bias" in p else y


def rope(x, positions, theta):
    """Pairs (i, i + head_dim / 2) as complex numbers, turned by position * frequency."""
    half = x.shape[-1] // 2
    angle = positions[:, :, None] * theta ** (-jnp.arange(half) / half).reshape(1, 1, -1)
    z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)[:, :, None]
    return jnp.concatenate([z.real, z.imag], -1)


def dense_attention(c, embed, p, x, batch):
    rows, seq, _ = x.shape
    project = lambda name: x @ p[name] + p.get(f"{name}_bias", jnp.zeros(1)).reshape(1, 1, -1)  # noqa: E731
    q, k, v = (project(n).reshape(rows, seq, -1, c.size(embed)) for n in ("query", "key", "value"))
    if c.qk_norm is not None:
        q = normalise(c.qk_norm, under(p, "query_norm."), q)
        k = normalise(c.qk_norm, under(p, "key_norm."), k)
    if c.rope is not None:
        q, k = (rope(a, batch["positions"], c.rope.theta) for a in (q, k))
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
        h = normalise(c.norm, under(p, "attention_norm."), x)
        h = dense_attention(c.attention, config.embed, under(p, "attention."), h, batch)
        x = x + c.residual_scale * h
        h = normalise(c.norm, under(p, "mlp_norm."), x)
        x = x + c.residual_scale * dense_mlp(c.mlp, under(p, "mlp."), h)
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


def batch_of(seed=0, *, segments=True):
    rng = np.random.default_rng(seed)
    at = np.tile(np.arange(SEQ), (ROWS, 1))
    cut = np.array([[3], [5]]) if segments else np.array([[SEQ], [SEQ]])
    ids = rng.integers(0, VOCAB, (ROWS, SEQ + 1))
    return {
        "tokens": jnp.asarray(ids[:, :-1], jnp.int32),
        "targets": jnp.asarray(ids[:, 1:], jnp.int32),
        "weights": jnp.asarray(rng.uniform(size=(ROWS, SEQ)), jnp.float32),
        "segments": jnp.asarray(1 + (at >= cut), jnp.int32),
        "positions": jnp.asarray(np.where(at >= cut, at - cut, at), jnp.int32),
    }


def abstract(config):
    return take_apart(nnx.eval_shape(lambda: build(config.build, jax.random.key(0))))


def model_of(config, *, std=0.4):
    """(static form, parameters) with biases, norm scales and padded rows away from their start."""
    split, rng = abstract(config), np.random.default_rng(0)
    return split.static, {
        k: jnp.asarray(std * rng.normal(size=v.shape) + k.endswith("scale"), jnp.float32)
        for k, v in split.params.items()
    }


@pytest.fixture(scope="module")
def built():
    return {name: model_of(config) for name, config in MODELS.items()}


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_equal_the_dense_models(name, built):
    config, (static, params), batch = MODELS[name], built[name], batch_of()
    assert config.violations() == []

    def ours(params):
        return put_together(static, params).loss(batch)[0]

    found, grads = jax.jit(jax.value_and_grad(ours))(params)
    wanted, oracle = jax.jit(jax.value_and_grad(lambda p: dense_loss(config, p, batch)))(params)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert set(grads) == set(oracle)
    # Where nothing turns q and k, a key's bias has no effect and its gradient is rounding.
    least = 1e-2 * max(np.abs(value).max() for value in oracle.values())
    for path, value in oracle.items():
        scale = max(np.abs(value).max(), least)
        np.testing.assert_allclose(grads[path], value, rtol=0, atol=2e-5 * scale, err_msg=path)
    for path in ("embedding",) if config.tied else ("head",):
        assert not np.any(np.asarray(grads[path])[VOCAB:]), "padded rows have a gradient"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_a_batch_may_leave_out(name, built):
    """No weights: one each. No positions: from 0. No segments: one document."""
    config, (static, params) = MODELS[name], built[name]
    full = batch_of(segments=False) | {"weights": jnp.ones((ROWS, SEQ))}
    bare = {k: full[k] for k in ("tokens", "targets")}
    total, count = put_together(static, params).loss(bare)
    np.testing.assert_allclose(total, dense_loss(config, params, full), rtol=1e-5)
    assert count == ROWS * SEQ


@pytest.mark.parametrize("name", ["mistral", "gpt2"])
def test_a_packed_row_is_the_sum_of_its_documents(name, built):
    static, params = built[name]
    model, batch = put_together(static, params), batch_of()
    packed = model.loss(batch)[0]
    alone = 0.0
    for row, cut in enumerate((3, 5)):
        for part in (slice(0, cut), slice(cut, SEQ)):
            document = {k: batch[k][row : row + 1, part] for k in ("tokens", "targets", "weights")}
            alone += model.loss(document)[0]
    np.testing.assert_allclose(packed, alone, rtol=1e-5)
    joined = model.loss({k: v for k, v in batch.items() if k not in ("segments", "positions")})[0]
    assert abs(joined - packed) > 1e-3, "documents see each other without segments"


@pytest.mark.parametrize(
    "name",
    [n if n in ("gpt2", "gemma2", "prefix and suffix") else pytest.param(n, marks=pytest.mark.slow)
     for n in MODELS],
)  # fmt: skip
def test_decoding_with_a_cache_equals_the_full_forward(name, built):
    """Three tokens at once, then one by one."""
    config, (static, params) = MODELS[name], built[name]
    batch = batch_of(segments=False)
    wanted = jax.jit(lambda p: dense_logits(config, p, batch))(params)
    model = put_together(static, params)
    step = jax.jit(lambda ids, caches, index: model.decode(ids, caches, index, comm=Local()))
    caches = model.empty_cache(ROWS, SEQ + 2, jnp.float32)
    assert len(caches) == len(config.prefix) + len(config.period) + len(config.suffix)
    start = 0
    for stop in (3, *range(4, SEQ + 1)):
        z, caches = step(batch["tokens"][:, start:stop], caches, jnp.int32(start))
        assert z.shape == (ROWS, stop - start, config.padded_vocab) and z.dtype == jnp.float32
        np.testing.assert_allclose(z[..., :VOCAB], wanted[:, start:stop], rtol=1e-4, atol=1e-4)
        assert np.all(np.asarray(z)[..., VOCAB:] < -1e29), "a padded id could be sampled"
        start = stop


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_padded_rows_stay_zero_in_training(name):
    config = replace(MODELS[name], vocab_multiple=16)
    static = abstract(config).static
    params = take_apart(build(config.build, jax.random.key(0))).params
    transform = optax.adamw(1e-2, weight_decay=0.1)
    state, batch = transform.init(params), batch_of()

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: put_together(static, p).loss(batch)[0])(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    before = params
    for _ in range(3):
        params, state = step(params, state)
    for path in ("embedding",) if config.tied else ("embedding", "head"):
        assert params[path].shape[0] == 16
        assert not np.any(np.asarray(params[path])[VOCAB:]), path
        assert np.any(np.asarray(params[path]) != np.asarray(before[path])), path


@pytest.mark.parametrize(
    "loop", [LayerLoop(unroll=True, remat="none"), LayerLoop(remat="dots")], ids=str
)
def test_how_the_loop_runs_does_not_change_the_loss(loop, built):
    static, params = built["prefix and suffix"]
    batch = batch_of()
    losses = [put_together(static, params).loss(batch, loop=x)[0] for x in (loop, LayerLoop())]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_bf16_compute_is_near_fp32_and_the_loss_is_fp32(built):
    static, params = built["llama"]
    model, batch = put_together(static, params), batch_of()
    total, count = model.loss(batch, comm=Local(jnp.bfloat16))
    assert total.dtype == count.dtype == jnp.float32
    assert 0 < abs(total / model.loss(batch)[0] - 1) < 2e-2


def test_dropout_follows_the_rows_numbers_not_their_places():
    config = decoder(block(dropout=0.5), block(dropout=0.5), layers=4, dropout=0.2)
    static, params = model_of(config)
    model, batch = put_together(static, params), batch_of() | {"rows": jnp.array([5, 9])}
    swapped = {k: v[::-1] for k, v in batch.items()}
    key = jax.random.key(0)
    loss = model.loss(batch, key=key)[0]
    np.testing.assert_allclose(model.loss(swapped, key=key)[0], loss, rtol=1e-5)
    plain = model.loss(batch)[0]
    others = [loss, plain, model.loss(batch, key=jax.random.key(1))[0],
              model.loss(batch | {"rows": jnp.array([5, 8])}, key=key)[0]]  # fmt: skip
    assert len({float(x) for x in others}) == 4
    np.testing.assert_allclose(plain, dense_loss(config, params, batch), rtol=1e-5)


def attention(heads, kv_heads=None, **fields):
    return AttentionConfig(heads, kv_heads, **fields)


GPT2 = DecoderConfig(
    vocab=50257, embed=768, layers=12, norm=LayerNorm(), learned_positions=1024, tied=True,
    period=(BlockConfig(attention(12, rope=None, **BIASED),
                        MlpConfig(3072, gelu_tanh, gated=False, bias=True), LayerNorm()),),
)  # fmt: skip


def gated(vocab, embed, layers, hidden, attention, **fields):
    return DecoderConfig(
        vocab, embed, layers, (BlockConfig(attention, MlpConfig(hidden)),), **fields
    )


KNOWN = [
    ("gpt2", GPT2, 124_439_808),
    ("llama-3-8b", gated(128256, 4096, 32, 14336, attention(32, 8)), 8_030_261_248),
    ("llama-2-7b", gated(32000, 4096, 32, 11008, attention(32)), 6_738_415_616),
    ("mistral-7b", gated(32000, 4096, 32, 14336, attention(32, 8, window=4096)), 7_241_732_096),
    (
        "qwen2-0.5b",
        gated(151936, 896, 24, 4864, attention(14, 2, qkv_bias=True), tied=True),
        494_032_768,
    ),
    (
        "qwen3-0.6b",
        gated(151936, 1024, 28, 3072, attention(16, 8, head_dim=128, qk_norm=RMSNorm()), tied=True),
        596_049_920,
    ),
]


@pytest.mark.parametrize(("name", "config", "count"), KNOWN, ids=[k[0] for k in KNOWN])
def test_parameter_counts_of_published_models(name, config, count):
    config = replace(config, vocab_multiple=1)
    split = abstract(config)
    assert sum(int(np.prod(p.shape)) for p in split.params.values()) == count
    assert split.rest == {}
    for path, leaf in split.params.items():
        assert len(split.axes[path]) == len(leaf.shape), path
        assert (split.axes[path][0] == "layers") == path.startswith("period."), path


def test_initial_values_follow_the_rule_and_names():
    config = decoder(block(heads=8, hidden=256, qkv_bias=True), layers=4, embed=128, vocab=250,
                     init=Initialisation(std=0.05))  # fmt: skip
    params = take_apart(build(config.build, jax.random.key(3))).params
    std = {k: float(v.std()) for k, v in params.items()}
    for name in ("attention.query", "attention.value", "mlp.gate", "mlp.up"):
        np.testing.assert_allclose(std[f"period.0.{name}"], 0.05, rtol=0.03)
    for name in ("attention.out", "mlp.down"):  # they write to the residual stream
        np.testing.assert_allclose(std[f"period.0.{name}"], 0.05 / 8**0.5, rtol=0.03)
    np.testing.assert_allclose(std["embedding"], 0.05 * (250 / 256) ** 0.5, rtol=0.03)
    assert not np.any(np.asarray(params["embedding"])[250:])
    matrices = {k: np.asarray(v) for k, v in params.items() if v.ndim == 3}
    flat = [layer.reshape(-1)[:512] for m in matrices.values() for layer in m]
    correlation = np.corrcoef(np.stack(flat)) - np.eye(len(flat))
    assert np.abs(correlation).max() < 0.3, "two matrices were drawn alike"
    # Layer i is drawn from its number: a deeper model begins with the same layers, but for scale.
    deeper = take_apart(build(replace(config, layers=16).build, jax.random.key(3))).params
    name = "period.0.attention.query"
    np.testing.assert_array_equal(deeper[name][:4], params[name])
    # and how the layers are cut into prefix, period and suffix does not matter.
    (b,) = config.period
    cut = replace(config, prefix=(b,), suffix=(b,))
    again = take_apart(build(cut.build, jax.random.key(3)))
    for ours, theirs in zip(
        natural_layers(config, params), natural_layers(cut, again.params), strict=True
    ):
        for path in ours:
            np.testing.assert_array_equal(ours[path], theirs[path], err_msg=path)


def test_std_by_fan_in():
    config = decoder(block(heads=8, hidden=256), embed=128, layers=1,
                     init=Initialisation(std=None, scale_residual=False))  # fmt: skip
    params = take_apart(build(config.build, jax.random.key(0))).params
    for name, fan_in in (("attention.out", 128), ("mlp.up", 128), ("mlp.down", 256)):
        np.testing.assert_allclose(params[f"period.0.{name}"].std(), fan_in**-0.5, rtol=0.03)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (decoder(block(), layers=0), ["layers=0 is not prefix + suffix (0) plus a multiple of the "
                                      "period (1 blocks); use layers=1 or 2"]),
        (decoder(block(), block(), layers=6, prefix=(block(),)),
         ["layers=6 is not prefix + suffix (1) plus a multiple of the period (2 blocks); use "
          "layers=5 or 7"]),
        (decoder(layers=2), ["layers=2 is not prefix + suffix (0) plus a multiple of the period "
                             "(0 blocks); use layers=2 or 3"]),
        (decoder(block(), vocab=0, chunk_tokens=0, vocab_multiple=-1),
         ["vocab=0; use at least 1", "vocab_multiple=-1; use at least 1",
          "chunk_tokens=0; use at least 1"]),
        (decoder(block(heads=3), embed=8),
         ["block 0: embed=8 is not a multiple of heads=3; set head_dim or use embed=6"]),
        (decoder(block(kv_heads=3)),
         ["block 0: heads=4 is not a multiple of kv_heads=3; use kv_heads=2"]),
        (decoder(block(head_dim=3)), ["block 0: head_dim=3 is odd; RoPE rotates pairs"]),
        (decoder(block(), block(dropout=1.0), dropout=-0.1),
         ["block 1: dropout=1.0; use a share in [0, 1)", "dropout=-0.1; use a share in [0, 1)"]),
        (decoder(block(rope=None)),
         ["some block has no rope and there are no learned positions; set either"]),
        (decoder(block(heads=0), block(kv_heads=0), block(hidden=0), block(window=0), layers=5,
                 learned_positions=0, suffix=(block(head_dim=0, softcap=-1.0),), logit_softcap=0.0),
         ["learned_positions=0; use a positive one, or None for none",
          "logit_softcap=0.0; use a positive one, or None for none",
          "block 0: heads=0, kv_heads=0; use at least 1", "block 1: kv_heads=0; use at least 1",
          "block 2: mlp.hidden=0; use at least 1",
          "block 3: window=0; use a positive one, or None",
          "block 4: head_dim=0; use a positive one, or None",
          "block 4: softcap=-1.0; use a positive one, or None"]),
    ],
)  # fmt: skip
def test_violations(config, said):
    assert config.violations() == said


@pytest.mark.parametrize(
    ("config", "rules", "sizes", "explicit", "said"),
    [
        (decoder(block(heads=4, kv_heads=2)), tensor(), {"tensor": 2, "fsdp": 4}, True, []),
        (decoder(block(heads=6, head_dim=2)), tensor(), {"tensor": 4}, True,
         ["heads=6 does not split over tensor=4; use 4 or 8 heads, or tensor=2 or 3 or 6",
          "kv_heads=6 does not split over tensor=4; use 4 or 8 kv_heads, or tensor=2 or 3 or 6"]),
        (decoder(block(heads=8, kv_heads=1, head_dim=2)), tensor(), {"tensor": 2}, True,
         ["kv_heads=1 does not split over tensor=2; use 2 kv_heads, or tensor=1"]),
        (decoder(block(heads=6, head_dim=2)), fsdp(), {"fsdp": 4}, True, []),
    ],
)  # fmt: skip
def test_mesh_violations(config, rules, sizes, explicit, said):
    assert config.mesh_violations(rules, sizes, explicit=explicit) == said


def test_explicit_mode_wants_one_split():
    mixed = ShardingRules(
        activations=table({"heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"})
    )
    config, sizes = decoder(block()), {"tensor": 2}
    (said,) = config.mesh_violations(mixed, sizes, explicit=True)
    assert "'vocab': ()" in said and "use the tensor() preset, or execution.mode='gspmd'" in said
    assert config.mesh_violations(mixed, sizes, explicit=False) == []


def test_flops_count_every_matmul_parameter_once_a_token():
    """2 FLOPs a parameter and token; of the tables the head's real rows only."""
    for name, config in MODELS.items():
        params = take_apart(
            nnx.eval_shape(lambda c=config: build(c.build, jax.random.key(0)))
        ).params
        matrices = sum(
            int(np.prod(p.shape))
            for k, p in params.items()
            if len(p.shape) > 1
            and k.split(".")[-1] in ("query", "key", "value", "out", "gate", "up", "down")
        )
        flops = config.flops(seq=SEQ, sequences=ROWS)
        bare = replace(
            config, period=tuple(replace(b, attention=replace(b.attention)) for b in config.period)
        )
        assert flops == bare.flops(seq=SEQ, sequences=ROWS)
        assert flops.matmul == 2 * ROWS * SEQ * (matrices + VOCAB * config.embed), name
