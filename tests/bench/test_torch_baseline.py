"""The torch yardstick, small and eager on CPU: the same model on the same documents, with the same
gradients, and it learns."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.experiment import Experiment, load_experiment
from jaxtrain.nn.module import put_together, take_apart
from jaxtrain.transformer.attention import AttentionConfig
from jaxtrain.transformer.feed_forward import MlpConfig

torch = pytest.importorskip("torch", reason="the torch baseline needs the extra `parity`")

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SIZES = {"layers": 2, "embed": 16, "heads": 4, "kv_heads": 2, "hidden": 24, "vocab": 32}


@pytest.fixture(scope="module")
def baseline() -> ModuleType:
    path = EXPERIMENTS / "baselines" / "torch_llama.py"
    spec = importlib.util.spec_from_file_location("torch_llama", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["torch_llama"] = module
    spec.loader.exec_module(module)
    return module


def ours(*, tied: bool) -> Experiment:
    experiment = load_experiment(EXPERIMENTS / "bench_6m.py")
    block = replace(
        experiment.model.period[0],
        attention=AttentionConfig(heads=SIZES["heads"], kv_heads=SIZES["kv_heads"]),
        mlp=MlpConfig(SIZES["hidden"]),
    )
    small = {name: SIZES[name] for name in ("layers", "embed", "vocab")}
    model = replace(experiment.model, **small, period=(block,), tied=tied, vocab_multiple=8)
    return replace(experiment, model=model)


NAMES = {
    "attention_norm.scale": "attention_norm.weight",
    "mlp_norm.scale": "mlp_norm.weight",
    **{f"attention.{name}": f"{name}.weight" for name in ("query", "key", "value", "out")},
    **{f"mlp.{name}": f"{name}.weight" for name in ("gate", "up", "down")},
}


def load(model: object, params: dict[str, jax.Array]) -> None:
    """Our parameters into the torch model; linear weights are [out, in] there."""
    found = {"norm.weight": params["norm.scale"], "embedding.weight": params["embedding"]}
    found["head.weight"] = params.get("head", params["embedding"])
    for name, theirs in NAMES.items():
        for layer, value in enumerate(params[f"period.0.{name}"]):
            found[f"blocks.{layer}.{theirs}"] = value.T
    for name, value in model.named_parameters(remove_duplicate=False):
        with torch.no_grad():
            value.copy_(torch.tensor(np.asarray(found[name])))


DTYPES = {"weights": "float32"}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_same_parameters_same_loss_gradients_and_flops(baseline: ModuleType, tied: bool) -> None:
    """Grouped queries, documents and a chunk that is not whole included: the torch model computes
    what ours does."""
    sizes = {"seq": 8, "batch": 3, "documents": 4, "chunk_tokens": 10}
    config = baseline.Llama(**SIZES, tied=tied, **sizes)
    torch.manual_seed(0)
    theirs = baseline.Decoder(config)
    split = take_apart(ours(tied=tied).model.build(jax.random.key(1)))
    # Larger weights than at birth, so that the loss depends on all of them.
    params = {k: v if "norm" in k else v * 10 for k, v in split.params.items()}
    load(theirs, params)
    (batch,) = baseline.batches_of(config, torch.device("cpu"))
    assert len(np.unique(batch["segments"])) > 1 and not batch["weights"].all()

    @jax.jit
    def ours_of(params: dict[str, jax.Array]) -> jax.Array:
        rows = {k: jnp.asarray(v.numpy().astype(DTYPES.get(k, "int32"))) for k, v in batch.items()}
        total, count, _ = put_together(split.static, {**params, **split.model_state}).loss(rows)
        return total / count

    with jax.default_matmul_precision("highest"):
        wanted, gradients = jax.value_and_grad(ours_of)(params)
    loss = theirs(batch, baseline.documents_mask(batch["segments"]))
    assert loss.item() == pytest.approx(float(wanted), rel=1e-5)
    assert abs(loss.item() - math.log(SIZES["vocab"])) > 1e-3
    loss.backward()
    found = baseline.Decoder(config)
    load(found, gradients)
    for (name, value), same in zip(theirs.named_parameters(), found.parameters(), strict=True):
        np.testing.assert_allclose(value.grad, same.detach(), atol=2e-6, rtol=1e-4, err_msg=name)
    sizes = sum(p.numel() for p in theirs.parameters())
    assert sizes == sum(leaf.size for leaf in params.values())
    assert config.flops() == ours(tied=tied).model.flops(seq=8, sequences=3)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_sees_what_the_dense_mask_shows(baseline: ModuleType) -> None:
    """What runs on a GPU; on a CPU it has no gradient."""
    config = baseline.Llama(**{**SIZES, "embed": 64}, seq=128, batch=2, documents=30)
    (batch,) = baseline.batches_of(config, torch.device("cpu"))
    rows = batch["segments"]
    mask = baseline.create_block_mask(baseline.visible_in(rows), 2, None, 128, 128, device="cpu")
    model = baseline.Decoder(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 if parameter.ndim == 1 else 5)
        dense = model(batch, baseline.documents_mask(rows))
        torch.testing.assert_close(model(batch, mask), dense)
        assert abs(model(batch) - dense) > 1e-5, "it matters what is hidden"


def test_residuals_are_in_the_compute_dtype(baseline: ModuleType) -> None:
    config = baseline.Llama(**SIZES, seq=8, batch=2, documents=4)
    model = baseline.Decoder(config, torch.bfloat16)
    met: list[torch.dtype] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, given, made: met.extend((given[0].dtype, made.dtype)))
    (batch,) = baseline.batches_of(config, torch.device("cpu"))
    model(batch, baseline.documents_mask(batch["segments"])).backward()
    assert set(met) == {torch.bfloat16}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(("dtype", "documents"), [("fp32", 0), ("bf16", 0), ("bf16", 4)])
def test_it_learns(baseline: ModuleType, dtype: str, documents: int) -> None:
    config = baseline.Llama(**SIZES, seq=8, batch=4, documents=documents)
    found = baseline.measure(
        config, dtype=dtype, steps=8, compiled=False, device=torch.device("cpu"), peak_flops=1e9
    )
    assert 0 < found["loss"] < found["first_loss"]
    assert found["first_loss"] == pytest.approx(math.log(SIZES["vocab"]), rel=0.02)
    assert found["tokens_per_s"] == pytest.approx(32 / found["step_s"])
    if not documents:
        assert found["mfu_full"] / found["mfu_causal"] == pytest.approx(
            config.flops().train_full / config.flops().train_causal
        )


def test_llama3_1b_has_its_published_size(baseline: ModuleType) -> None:
    """1.24B parameters (model card), counted without making them."""
    with torch.device("meta"):
        model = baseline.Decoder(baseline.PRESETS["llama3_1b"])
    assert sum(p.numel() for p in model.parameters()) == 1_235_814_400
