"""Against `peft` itself: its adapters in our model, and ours in its model, by their logits.

Needs the extra `parity`: pip install '.[parity]'.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from theirs import ids, loaded, made, our_logits, their_logits
from tiny_adapters import RANK, adapters_of, every_matrix, shapes
from tiny_families import template

from jaxtrain import LoRA
from jaxtrain.huggingface import huggingface_lora, read_config, read_params
from jaxtrain.huggingface.peft import read_adapters
from jaxtrain.huggingface.peft_write import write_adapters
from jaxtrain.transformer.decoder import DecoderConfig

peft: Any = pytest.importorskip("peft", reason="compares with peft; pip install '.[parity]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries

CASES: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]] = {
    "llama": (("q_proj", "v_proj", "down_proj"), {}, ("*.out", "*.gate")),
    "gpt2": (("attn.c_proj", "c_fc"), {"fan_in_fan_out": True}, ("*.out", "*.mlp.down")),
    "gemma 2": (("q_proj", "o_proj"), {"use_rslora": True}, ("*.1.*.key", "*.mlp.*")),
    "mixtral": (("q_proj", "k_proj"), {}, ("*.router", "*.gate", "*.up", "*.down", "*.value")),
    "qwen 2 moe": (("q_proj", "gate_proj"), {}, ("*.shared.*", "*.query")),
    "deepseek 2": (
        ("q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
        {},
        ("period.1.mlp.[gud]*", "*.latent_up"),
    ),
}
"""Modules that have adapters of theirs, further fields, and patterns of matrices that have ours."""


def our_logits_with(
    config: DecoderConfig, base: Path, adapters: dict[str, jax.Array], lora: LoRA
) -> np.ndarray:
    """With alpha / rank A B added to each matrix, in float64."""
    params = {k: np.asarray(v) for k, v in read_params(base, config, template(config)).items()}
    for path in lora.targets:
        a, b = (np.asarray(adapters[f"{path}_lora_{part}"], np.float64) for part in "ab")
        params[path] = (params[path] + lora.alpha / lora.rank * a @ b).astype(np.float32)
    return our_logits(config, {k: jax.numpy.asarray(v) for k, v in params.items()}, ids())


@pytest.mark.parametrize("name", CASES)
def test_logits_with_adapters_agree_both_ways(name: str, tmp_path: Path) -> None:
    modules, fields, patterns = CASES[name]
    base, theirs, ours = tmp_path / "base", tmp_path / "theirs", tmp_path / "ours"
    model = made(name, base)
    bare = their_logits(model, ids())
    given = {"target_modules": list(modules), "task_type": "CAUSAL_LM", **fields}
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=RANK, lora_alpha=2, init_lora_weights=False, **given)
    ).eval()
    adapted.save_pretrained(theirs)
    expected = their_logits(adapted, ids())
    assert np.abs(expected - bare).max() > 0.1, "adapters that do something"

    config = read_config(base)
    lora = huggingface_lora(theirs, config)
    adapters = read_adapters(theirs, config, shapes(adapters_of(config, lora.targets)))
    found = our_logits_with(config, base, adapters, lora)
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)

    mine = LoRA(RANK, 0.5, every_matrix(config, *patterns))
    adapters = adapters_of(config, mine.targets)
    write_adapters(ours, config, adapters, alpha=mine.alpha, base=str(base))
    taken = their_logits(peft.PeftModel.from_pretrained(loaded(base), ours).eval(), ids())
    assert np.abs(taken - bare).max() > 0.1
    expected = our_logits_with(config, base, adapters, mine)
    np.testing.assert_allclose(taken, expected, atol=1e-4, rtol=0)
