"""Against `transformers` itself, on models it made: logits both ways, and after three steps.

Needs the extra `parity`: pip install '.[parity]'.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_families import abstract, template

import jaxtrain
from jaxtrain.models.decoder import DecoderConfig
from jaxtrain.nn.communicator import Local
from jaxtrain.nn.module import put_together
from jaxtrain.run.session import open_session
from jaxtrain.weights.huggingface import read_config, read_params, write_folder

WHY = "compares with transformers; pip install '.[parity]'"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch: Any = pytest.importorskip("torch", reason=WHY)
    transformers: Any = pytest.importorskip("transformers", reason=WHY)

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries

VOCAB, SEQ = 37, 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SIZES),
    "llama 3 tied": (
        "LlamaConfig",
        {**SIZES, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "llama stretched, biases": (
        "LlamaConfig",
        {
            **SIZES,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
            "attention_bias": True,
            "mlp_bias": True,
            "hidden_act": "gelu",
        },
    ),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": 5, "head_dim": 12}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4}),
    "mixtral windows": (
        "MixtralConfig",
        {**SIZES, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5},
    ),
    "qwen 2": ("Qwen2Config", {**SIZES, "tie_word_embeddings": True}),
    "qwen 2 windows": ("Qwen2Config", {**SIZES, **QWEN_WINDOWS}),
    "qwen 3": ("Qwen3Config", {**SIZES, "head_dim": 16}),
    "gpt2": ("GPT2Config", GPT2),
    "gpt2 untied, unscaled": (
        "GPT2Config",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 40, "scale_attn_weights": False},
    ),
}


def made(name: str, folder: Path) -> Any:
    """A model of theirs in a folder, as they save it. They begin biases at 0 and norms at 1, which
    would hide one that is put in another's place."""
    kind, fields = THEIRS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**fields))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder, max_shard_size="20KB")
    return model.eval()


def their_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def our_logits(config: DecoderConfig, params: dict[str, jax.Array], ids: np.ndarray) -> np.ndarray:
    model = put_together(abstract(config).static, params)
    caches = model.empty_cache(*ids.shape, jnp.float32)

    def run(ids: jax.Array, caches: Any) -> jax.Array:
        return model.decode(ids, caches, jnp.int32(0), comm=Local(jnp.float32))[0]

    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(run)(jnp.asarray(ids), caches))[..., : config.vocab]


def loaded(folder: Path) -> Any:
    """Their model of a folder, which has every tensor it needs and no other."""
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(said.values()), said
    return model.eval()


def ids(rows: int = 2) -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, (rows, SEQ))


@pytest.mark.parametrize("name", THEIRS)
def test_logits_are_theirs_and_what_we_write_they_load(tmp_path: Path, name: str) -> None:
    theirs = their_logits(made(name, tmp_path / "in"), ids())
    assert np.std(theirs) > 0.3, "logits that say something"
    config = replace(read_config(tmp_path / "in"), vocab_multiple=16)
    params = read_params(tmp_path / "in", config, template(config))
    np.testing.assert_allclose(our_logits(config, params, ids()), theirs, atol=1e-4, rtol=0)

    write_folder(tmp_path / "out", config, params)
    model = loaded(tmp_path / "out")
    assert model.dtype == torch.float32
    np.testing.assert_array_equal(their_logits(model, ids()), theirs)
    write_folder(tmp_path / "half", config, params, dtype="bfloat16", shard_bytes=20_000)
    half = loaded(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    by_name = dict(model.named_parameters())
    for key, parameter in half.named_parameters():
        assert torch.equal(parameter, by_name[key].to(torch.bfloat16)), key


def test_experts_that_they_save_fused_are_read(tmp_path: Path) -> None:
    """As they are in memory from version 5 on."""
    model = made("mixtral", tmp_path / "in")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    config = read_config(tmp_path / "in")
    wanted = read_params(tmp_path / "in", config, template(config))
    found = read_params(tmp_path / "fused", read_config(tmp_path / "fused"), template(config))
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


@pytest.mark.parametrize("name", ["llama 3 tied", "gpt2", "qwen 3", "mixtral"])
def test_three_steps_between_import_and_export(tmp_path: Path, name: str) -> None:
    """Trained on fsdp x tensor: the first loss is what they have on that batch, and the trained
    model has the same logits there as here."""
    theirs = made(name, tmp_path / "in")
    config = replace(read_config(tmp_path / "in"), vocab_multiple=16)
    experiment = jaxtrain.Experiment(
        model=config,
        data=jaxtrain.data.BigramChain(vocab=VOCAB, seq=SEQ),
        optimizer=jaxtrain.AdamW(1e-2),
        steps=3,
        batch=8,
        evaluation=None,
        checkpoints=None,
        logging=jaxtrain.Logging(every=1, tensorboard=False),
    )
    mesh = jaxtrain.mesh_from_axes(fsdp=4, tensor=2)
    session = open_session(experiment, mesh, cache_dir=tmp_path / "cache")
    try:
        imported = read_params(
            tmp_path / "in",
            config,
            {
                path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
                for path, leaf in session.state.params.items()
            },
        )
        before = {path: np.asarray(leaf) for path, leaf in imported.items()}
        session.state = replace(session.state, params=imported)
        losses = []
        for _ in range(3):
            _, batch = session.loader.next()
            if not losses:
                first = {k: np.asarray(batch[k]).reshape(-1, SEQ) for k in ("tokens", "targets")}
            losses.append(float(session.step(batch)["loss"]))
        z = torch.tensor(their_logits(theirs, first["tokens"])).reshape(-1, VOCAB)
        expected = torch.nn.functional.cross_entropy(
            z, torch.tensor(first["targets"]).long().ravel()
        )
        assert losses[0] == pytest.approx(float(expected), rel=1e-5)
        assert losses[2] < losses[0]

        write_folder(tmp_path / "out", config, session.state.params, max_seq=64)
        trained = {
            path: jnp.asarray(np.asarray(leaf)) for path, leaf in session.state.params.items()
        }
    finally:
        session.close()
    assert all((before[path] != np.asarray(leaf)).any() for path, leaf in trained.items())
    model = loaded(tmp_path / "out")
    ours = our_logits(config, trained, ids())
    np.testing.assert_allclose(their_logits(model, ids()), ours, atol=1e-4, rtol=0)
    assert np.abs(ours - their_logits(theirs, ids())).max() > 0.05, "three steps changed them"
