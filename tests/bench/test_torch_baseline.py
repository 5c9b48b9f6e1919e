"""The torch yardstick, small and eager on CPU: the same model, and it learns."""

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
from jaxtrain.models.block import AttentionConfig, MlpConfig
from jaxtrain.nn.module import put_together, take_apart

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


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_same_parameters_same_loss_and_flops(baseline: ModuleType, tied: bool) -> None:
    """Grouped queries included: the torch model computes what ours does."""
    config = baseline.Llama(**SIZES, tied=tied, seq=8, batch=3)
    torch.manual_seed(0)
    theirs = baseline.Decoder(config)
    split = take_apart(ours(tied=tied).model.build(jax.random.key(1)))
    # Larger weights than at birth, so that the loss depends on all of them.
    params = {k: v if "norm" in k else v * 10 for k, v in split.params.items()}
    load(theirs, params)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab"], (3, 9)).astype(np.int32)
    batch = {"tokens": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}
    with jax.default_matmul_precision("highest"):
        total, count, _ = put_together(split.static, {**params, **split.rest}).loss(batch)
    loss = theirs(torch.tensor(tokens, dtype=torch.int64)).item()
    assert loss == pytest.approx(float(total / count), rel=1e-5)
    assert abs(loss - math.log(SIZES["vocab"])) > 1e-3
    sizes = sum(p.numel() for p in theirs.parameters())
    assert sizes == sum(leaf.size for leaf in params.values())
    assert config.flops() == ours(tied=tied).model.flops(seq=8, sequences=3)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_it_learns(baseline: ModuleType, dtype: str) -> None:
    config = baseline.Llama(**SIZES, seq=8, batch=4)
    found = baseline.measure(
        config, dtype=dtype, steps=8, compiled=False, device=torch.device("cpu"), peak_flops=1e9
    )
    assert 0 < found["loss"] < found["first_loss"]
    assert found["first_loss"] == pytest.approx(math.log(SIZES["vocab"]), rel=0.02)
    assert found["tokens_per_s"] == pytest.approx(32 / found["step_s"])
    assert found["mfu_full"] / found["mfu_causal"] == pytest.approx(
        config.flops().train_full / config.flops().train_causal
    )


def test_llama3_1b_has_its_published_size(baseline: ModuleType) -> None:
    """1.24B parameters (model card), counted without making them."""
    with torch.device("meta"):
        model = baseline.Decoder(baseline.PRESETS["llama3_1b"])
    assert sum(p.numel() for p in model.parameters()) == 1_235_814_400
