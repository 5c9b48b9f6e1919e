"""Against `transformers` itself, on models it made: logits both ways, and after three steps.

Needs the extra `parity`: pip install '.[parity]'.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from theirs import (
    DYNAMIC,
    LLAMA3,
    LONGROPE,
    SEQ,
    SIZES,
    THEIRS,
    VOCAB,
    YARN,
    ids,
    loaded,
    made,
    our_logits,
    their_logits,
    torch,
    transformers,
)
from tiny_families import abstract, template

import jaxtrain
from jaxtrain.huggingface import read_config, read_params, write_folder
from jaxtrain.optim.precision import fp32
from jaxtrain.session.session import open_session
from jaxtrain.weights.generate import sample_ids

pytestmark = pytest.mark.filterwarnings("ignore")  # of other people's libraries

SLOW = ("deepseek 2, queries of tokens, all mixed", "deepseek 3, one group, long values")


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [slow(n) if n in SLOW else n for n in THEIRS])
def test_logits_are_theirs_and_what_we_write_they_load(tmp_path: Path, name: str) -> None:
    theirs = their_logits(made(name, tmp_path / "in"), ids())
    assert np.std(theirs) > 0.3, "logits that say something"
    config = replace(read_config(tmp_path / "in"), vocab_multiple=16)
    params = read_params(tmp_path / "in", config, template(config))
    np.testing.assert_allclose(our_logits(config, params, ids()), theirs, atol=1e-4, rtol=0)

    write_folder(tmp_path / "out", config, params)
    model = loaded(tmp_path / "out")
    assert model.dtype == torch.float32
    if (
        model.config.model_type
        == transformers.AutoConfig.from_pretrained(tmp_path / "in").model_type
    ):
        np.testing.assert_array_equal(their_logits(model, ids()), theirs)
    else:  # a model that several families have is written as the first of them
        np.testing.assert_allclose(their_logits(model, ids()), theirs, atol=1e-5, rtol=0)
    write_folder(tmp_path / "half", config, params, dtype="bfloat16", shard_bytes=20_000)
    half = loaded(tmp_path / "half")
    assert half.dtype == torch.bfloat16
    by_name = dict(model.named_parameters())
    for key, parameter in half.named_parameters():
        assert torch.equal(parameter, by_name[key].to(torch.bfloat16)), key


GREEDY = [
    name if name in ("gemma 3", "deepseek 3") else pytest.param(name, marks=pytest.mark.slow)
    for name in THEIRS
]


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_text_is_theirs(tmp_path: Path, name: str) -> None:
    """Each of 20 tokens, with caches on both sides: past windows, past the first training's length
    of dynamic NTK scaling, and past Phi 3's switch, where both make the cache anew."""
    made(name, tmp_path, embeddings=0.1)  # or the next token is often the last one again
    # Of LongRoPE in another family they keep keys that were turned by the short factors.
    prompt = ids(3)[2, : 17 if name == "llama longrope" else 5]
    model = loaded(tmp_path)
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        theirs = model.generate(torch.tensor(prompt[None]), max_new_tokens=20, do_sample=False)
    config = replace(read_config(tmp_path), vocab_multiple=16)
    params = read_params(tmp_path, config, template(config))
    static, greedy = abstract(config).static, {"tokens": 20, "temperature": 0.0}
    ours = sample_ids(static, config, fp32, params, prompt.tolist(), **greedy)
    assert ours == theirs[0, len(prompt) :].tolist()
    assert len(set(ours)) > 2, "a text that says something"


def test_experts_that_they_save_fused_are_read(tmp_path: Path) -> None:
    """As they are in memory from version 5 on."""
    model = made("mixtral", tmp_path / "in")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    config = read_config(tmp_path / "in")
    wanted = read_params(tmp_path / "in", config, template(config))
    found = read_params(tmp_path / "fused", read_config(tmp_path / "fused"), template(config))
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(found[path], leaf, err_msg=path)


TRAINED = [
    *("llama 3 tied", "gpt2", "qwen 3", "mixtral", "qwen 2 moe"),
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("gemma 3", "olmo 2", "phi 3 longrope", "deepseek 2")
    ),
]


@pytest.mark.parametrize("name", TRAINED)
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


TABLES: list[dict[str, Any]] = [
    LLAMA3,
    {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
    YARN,
    {**YARN, "mscale": None, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5},
    {**YARN, "attention_factor": 1.3, "factor": 2.0},
    DYNAMIC,
    LONGROPE,
    {**LONGROPE, "attention_factor": 1.1, "factor": None},
]


@pytest.mark.parametrize("rope_parameters", TABLES)
def test_frequencies_are_theirs_at_every_length(
    tmp_path: Path, rope_parameters: dict[str, Any]
) -> None:
    """As their own functions make them, of what their own config writes."""
    fields = {**SIZES, "rope_parameters": dict(rope_parameters)}
    config = transformers.LlamaConfig(**fields, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    rope = read_config(tmp_path).period[0].attention.rope
    make = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]]
    assert rope is not None
    for seq in (1, 16, 17, 64, 65, 200):
        theirs, scaling = make(config, "cpu", seq_len=seq)
        np.testing.assert_allclose(rope.frequencies(8, seq), theirs.numpy(), rtol=1e-5)
        assert rope.attention_scaling == pytest.approx(scaling, rel=1e-12)
