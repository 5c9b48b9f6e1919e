"""The decoder against a dense transformer written out below in plain jax.numpy."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dense_decoder import dense_logits, dense_loss
from flax import nnx

from jaxtrain.attention.rotary.rope import Rope
from jaxtrain.attention.rotary.scaling import LinearScaling, LongRope, Yarn
from jaxtrain.moe.router import Capacity
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import build, put_together, take_apart
from jaxtrain.nn.norm import LayerNorm, RMSNorm
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.transformer import block as block_module
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.block import BlockConfig
from jaxtrain.transformer.decoder import DecoderConfig
from jaxtrain.transformer.feed_forward import MlpConfig, gelu_exact, gelu_tanh
from jaxtrain.transformer.latent import LatentAttentionConfig
from jaxtrain.transformer.mixture import MoeConfig
from jaxtrain.transformer.place import add_bias

ROWS, SEQ, VOCAB = 2, 8, 13


def decoder(*period, layers=2, **fields):
    return DecoderConfig(
        **{"vocab": VOCAB, "embed": 8, "layers": layers, "period": period, "vocab_multiple": 8,
           "chunk_tokens": 8, **fields}
    )  # fmt: skip


NORM = RMSNorm()


def block(
    heads=4, hidden=12, *, mlp=None, norm=NORM, post_norm=None, residual_scale=1.0, dropout=0.0,
    **fields,
):  # fmt: skip
    mlp, attention = mlp or MlpConfig(hidden), AttentionConfig(heads, **fields)
    return BlockConfig(attention, mlp, norm, residual_scale, dropout, post_norm)


OFFSET = RMSNorm(unit_offset=True)
SANDWICH = {"norm": OFFSET, "post_norm": RMSNorm(1e-3, unit_offset=True)}
LONG = Rope(100.0, LongRope((1.0, 2.0, 3.0), (2.0, 4.0, 8.0), 4.0, 2), 0.75)


def latent(value, *, mlp=None, query_latent=6):
    sizes = dict(latent=5, nope_head_dim=4, rope_head_dim=4, value_head_dim=value)
    attention = LatentAttentionConfig(2, **sizes, query_latent=query_latent)
    return BlockConfig(attention, mlp or MlpConfig(12), NORM)


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
        block(head_dim=4, softcap=2.0, scale=0.7, window=3, **SANDWICH),
        block(head_dim=4, softcap=2.0, scale=0.7, mlp=MlpConfig(10, gelu_exact), **SANDWICH),
        layers=4, tied=True, embedding_scale=8**0.5, logit_softcap=3.0, norm=OFFSET,
    ),
    "gemma3": decoder(
        block(head_dim=4, kv_heads=2, window=3, qk_norm=OFFSET, rope=Rope(100.0), **SANDWICH),
        block(head_dim=4, kv_heads=2, qk_norm=OFFSET, rope=Rope(1e3, LinearScaling(4.0)),
              mlp=MlpConfig(10, gelu_tanh), **SANDWICH),
        tied=True, embedding_scale=8**0.5, norm=OFFSET,
    ),
    "olmo2": decoder(
        block(kv_heads=2, norm=None, post_norm=NORM, qk_norm=NORM, qk_norm_across_heads=True,
              residual_scale=0.5),
    ),
    "phi3": decoder(block(heads=2, kv_heads=1, head_dim=8, window=5, rope=LONG), embed=8),
    "yarn": decoder(block(kv_heads=2, rope=Rope(1e3, Yarn(4.0, 64)))),
    "mixtral": decoder(
        block(kv_heads=2, mlp=MoeConfig(12, experts=4)), block(mlp=MoeConfig(10, 3, 1, gelu_exact,
        gated=False)), layers=5, suffix=(block(mlp=MoeConfig(8, experts=2)),),
    ),
    "deepseek": decoder(
        latent(10, mlp=MoeConfig(10, 3)), prefix=(latent(6),), layers=4,
        suffix=(latent(10, query_latent=None),),
    ),
    "granite": decoder(block(residual_scale=0.3), embedding_scale=3.0, logit_scale=0.25),
    "prefix and suffix": decoder(
        block(window=2, rope=Rope(theta=100.0)), block(hidden=16),
        layers=7, prefix=(block(mlp=MlpConfig(4, bias=True)),), logit_scale=0.5,
        suffix=(block(heads=2, head_dim=2), block(window=4, residual_scale=0.3)),
    ),
}  # fmt: skip
QUICK = ("gpt2", "gemma3", "olmo2", "mixtral")
"""The other models run with the slow tests: between them all they have every field."""


def models(*names, quick=QUICK):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


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


def initial(config, seed=0):
    """Parameters as training starts with them."""
    return jax.jit(lambda key: take_apart(build(config.build, key)).params)(jax.random.key(seed))


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


@pytest.mark.parametrize("name", models(*MODELS))
@pytest.mark.sampled(3)
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
    # DeepSeek's large gradients: 4e-5 apart as tests compile, 1e-5 as users do.
    limit = 6e-5 if name == "deepseek" else 2e-5
    for path, value in oracle.items():
        scale = max(np.abs(value).max(), least)
        np.testing.assert_allclose(grads[path], value, rtol=0, atol=limit * scale, err_msg=path)
    for path in ("embedding",) if config.tied else ("head",):
        assert not np.any(np.asarray(grads[path])[VOCAB:]), "padded rows have a gradient"


@pytest.mark.parametrize("name", models("llama", "gpt2", quick=()))
def test_what_a_batch_may_leave_out(name, built):
    """No weights: one each. No positions: from 0. No segments: one document."""
    config, (static, params) = MODELS[name], built[name]
    full = batch_of(segments=False) | {"weights": jnp.ones((ROWS, SEQ))}
    bare = {k: full[k] for k in ("tokens", "targets")}
    total, count, _ = put_together(static, params).loss(bare)
    np.testing.assert_allclose(total, dense_loss(config, params, full), rtol=1e-5)
    assert count == ROWS * SEQ


@pytest.mark.parametrize("name", models("mistral", "qwen3"))
def test_a_packed_row_is_the_sum_of_its_documents(name, built):
    static, params = built[name]
    model, batch = put_together(static, params), batch_of()
    packed = model.loss(batch)[0]
    alone, loss = 0.0, jax.jit(lambda document: model.loss(document)[0])
    for row, cut in enumerate((3, 5)):
        for part in (slice(0, cut), slice(cut, SEQ)):
            document = {k: batch[k][row : row + 1, part] for k in ("tokens", "targets", "weights")}
            alone += loss(document)
    np.testing.assert_allclose(packed, alone, rtol=1e-5)
    joined = model.loss({k: v for k, v in batch.items() if k not in ("segments", "positions")})[0]
    assert abs(joined - packed) > 1e-3, "documents see each other without segments"


@pytest.mark.parametrize("name", models(*MODELS, quick=("gpt2", "prefix and suffix")))
@pytest.mark.sampled(3)
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


def test_capacity_is_for_tokens_of_documents_and_not_for_generation():
    """Ids in padding change no loss, which they do where they are a document; and single tokens are
    decoded as without a capacity."""
    limited = MoeConfig(12, experts=4, capacity=Capacity(0.5, routing_group=ROWS * SEQ))
    config = decoder(block(mlp=limited), layers=1)
    static, params = abstract(config).static, initial(config)
    ids = np.random.default_rng(0).integers(0, VOCAB, (3, ROWS, SEQ))
    real = np.arange(SEQ) < np.array([[3], [7]])
    loss = jax.jit(lambda params, batch: put_together(static, params).loss(batch)[0])

    def with_ids(numbers, segments):
        tokens = np.where(real, ids[0], numbers).astype(np.int32)
        batch = dict(tokens=tokens, targets=ids[1].astype(np.int32), segments=segments)
        return float(loss(params, batch | {"weights": real.astype(np.float32)}))

    padded, whole = real.astype(np.int32), 2 - real.astype(np.int32)
    assert with_ids(ids[1], padded) == with_ids(ids[2], padded)
    assert with_ids(ids[1], whole) != with_ids(ids[2], whole)
    assert with_ids(ids[1], padded) != with_ids(ids[1], whole)
    free = decoder(block(mlp=replace(limited, capacity=None)), layers=1)
    decoded = []
    for parts in (static, abstract(free).static):
        model = put_together(parts, params)
        caches = model.empty_cache(ROWS, SEQ, jnp.float32)
        decoded.append(
            model.decode(jnp.asarray(ids[0][:, :3]), caches, jnp.int32(0), comm=Local())[0]
        )
    np.testing.assert_array_equal(*decoded)


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_padded_rows_stay_zero_in_training(name):
    config = replace(MODELS[name], vocab_multiple=16)
    static = abstract(config).static
    params = initial(config)
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
    "loop",
    [
        pytest.param(LayerLoop(unroll=True, remat="none"), marks=pytest.mark.slow),
        pytest.param(LayerLoop(remat="dots"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_how_the_loop_runs_does_not_change_the_loss(loop, built):
    static, params = built["prefix and suffix"]
    batch = batch_of()
    losses = [put_together(static, params).loss(batch, loop=x)[0] for x in (loop, LayerLoop())]
    np.testing.assert_allclose(*losses, rtol=1e-6)


def test_bf16_compute_is_near_fp32_and_the_loss_is_fp32(built):
    static, params = built["llama"]
    model, batch = put_together(static, params), batch_of()
    total, count, _ = model.loss(batch, comm=Local(jnp.bfloat16))
    assert total.dtype == count.dtype == jnp.float32
    assert 0 < abs(total / model.loss(batch)[0] - 1) < 2e-2


@pytest.mark.slow
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


def test_no_two_layers_and_no_two_tokens_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers have their numbers in natural order, and tokens of packed documents their places."""
    asked = []

    def noted(x, rate, keys, *, name, layer=0):
        asked.append((name, int(layer)))
        return x

    monkeypatch.setattr(block_module, "dropout", noted)
    one, other = block(dropout=0.5), block(hidden=4, dropout=0.5)
    config = decoder(one, other, layers=7, prefix=(other,), suffix=(one, one))
    model = put_together(*model_of(config))
    batch = batch_of() | {"rows": jnp.array([5, 9])}
    context = model.context(batch, jax.random.key(0), Local())
    jax.eval_shape(lambda: model.loss(batch, key=context.keys.key, loop=LayerLoop(unroll=True)))
    assert asked == [(name, layer) for layer in range(7) for name in ("attention", "mlp")]
    tokens = list(zip(*map(np.asarray, context.keys[1:]), strict=True))
    assert tokens == [(row, at) for row in (5, 9) for at in range(SEQ)]


def test_the_gradient_of_a_bias_is_summed_in_fp32() -> None:
    """4096 ones: in bf16 a running sum stops growing at 256."""
    y = jnp.zeros((4096, 3), jnp.bfloat16)
    gradient = jax.make_jaxpr(jax.grad(lambda b: jnp.sum(add_bias(y, b).astype(jnp.float32))))(
        jnp.zeros(3)
    )
    sums = [e for e in gradient.eqns if e.primitive.name == "reduce_sum"]
    assert sums and all(e.invars[0].aval.dtype == jnp.float32 for e in sums)
    np.testing.assert_array_equal(
        add_bias(jnp.ones((2, 3), jnp.bfloat16), jnp.full(3, 2.0)), 3 * np.ones((2, 3))
    )
