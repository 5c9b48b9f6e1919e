"""Models that are there already: a run's or a folder's, used for text and handed on."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtrain
from jaxtrain import FineTuning, FromHuggingFace, LoRA, cli
from jaxtrain.data import ByteTokenizer
from jaxtrain.experiment import config_of, load_experiment
from jaxtrain.experiment.stored import stored_field
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import put_together
from jaxtrain.step.layer_order import params_in_natural_order
from jaxtrain.weights.loading import load, static_of

ROOT = Path(__file__).parents[2]
MESH = jaxtrain.mesh_from_axes(data=1)
WORDS = "the quick brown fox jumps over the lazy dog and runs away from it again. "


@pytest.fixture
def text(decoder: jaxtrain.Experiment, tmp_path: Path) -> jaxtrain.Experiment:
    """A decoder on a few files of text, with a trained tokenizer."""
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(WORDS[i:] * 4)
    files = jaxtrain.TextFiles(str(tmp_path / "text" / "?.txt"))
    init = jaxtrain.nn.Initialisation(std=0.5)  # so that the likeliest is no matter of rounding
    return replace(
        decoder,
        model=replace(decoder.model, vocab=280, layers=2, init=init, vocab_multiple=4),
        data=jaxtrain.TextData(files, jaxtrain.data.BpeTokenizer(vocab=280), seq=16),
        steps=3,
        checkpoints=jaxtrain.SavePolicy(every=1000),
    )


def trained(experiment: jaxtrain.Experiment, folder: Path, **axes: int) -> jaxtrain.Result:
    return jaxtrain.train(
        experiment,
        jaxtrain.mesh_from_axes(**(axes or {"data": 1})),
        run_dir=folder / "run",
        cache_dir=folder / "cache",
        stream=io.StringIO(),
    )


def test_a_run_its_session_and_its_folder_go_on_alike(
    text: jaxtrain.Experiment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With averaged weights, from two stages; with nothing left of corpus and cache."""
    given = replace(text, ema_decay=0.5, microbatches=2)
    result = trained(given, tmp_path, stage=2)
    wanted = jaxtrain.generate(result.session, "the ", tokens=12, seed=3)
    shutil.rmtree(tmp_path / "text")
    shutil.rmtree(tmp_path / "cache")
    told = ["--prompt", "the ", "--tokens", "12", "--seed", "3"]
    assert cli.main(["generate", str(tmp_path / "run"), *told]) == 0
    assert capsys.readouterr().out == f"the {wanted}\n"
    out = tmp_path / "out"
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert cli.main(["generate", str(out), *told]) == 0
    assert capsys.readouterr().out == f"the {wanted}\n"

    averages = load(tmp_path / "run").params
    last = load(tmp_path / "run", averaged=False).params
    assembly, state = result.session.assembly, result.session.state
    ema, params = (
        params_in_natural_order(assembly, state.ema),
        params_in_natural_order(assembly, state.params),
    )
    for name in last:
        np.testing.assert_array_equal(averages[name], ema[name])
        np.testing.assert_array_equal(last[name], params[name])
    again = cli.main(["export", str(tmp_path / "run"), "--out", str(out)])
    assert again == cli.REFUSED and "is there already" in capsys.readouterr().err


def test_a_model_is_loaded_split_over_a_mesh(text: jaxtrain.Experiment, tmp_path: Path) -> None:
    trained(text, tmp_path)
    whole = load(tmp_path / "run").params
    mesh = jaxtrain.mesh_from_axes(fsdp=2, tensor=2)
    jaxtrain.export(tmp_path / "run", tmp_path / "out", mesh=mesh, dtype="bfloat16")
    for path in (tmp_path / "run", tmp_path / "out"):
        split = load(path, mesh=mesh).params
        assert len(split["period.0.mlp.up"].sharding.device_set) == 4
        for name, leaf in whole.items():
            wide = leaf if path.name == "run" else leaf.astype(jnp.bfloat16).astype(jnp.float32)
            np.testing.assert_array_equal(split[name][: len(wide)], wide)  # but for padding


def test_bytes_are_published_as_a_tokenizer_of_the_same_ids() -> None:
    ours = ByteTokenizer()
    theirs = ours.published()
    assert (theirs.size, theirs.eos) == (ours.size, ours.eos)
    np.testing.assert_array_equal(theirs.token_bytes, ours.token_bytes)
    for given in (WORDS, "\x00\x7f\t\r\n ", "é ñ \u00a0\u00ad", "日本語 🙂", "<|endoftext|>"):
        assert theirs.encode(given) == ours.encode(given)
        assert theirs.decode(theirs.encode(given)) == given


# Experiments out of config.json.


FILES = [p for p in sorted((ROOT / "experiments").glob("*.py")) if p.stem != "finetune_lora"]
"""But for the one whose model is in a folder."""


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_what_a_run_stores_comes_back_as_it_was(path: Path, tmp_path: Path) -> None:
    experiment = load_experiment(path)
    config = {"experiment": config_of(experiment)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, stored in config["experiment"].items():
        if path.stem in json.dumps(stored):  # the file's own classes
            with pytest.raises(ValueError, match=f"the run's {name} is not of this library"):
                stored_field(tmp_path, name)
        elif name != "class":
            assert stored_field(tmp_path, name) == getattr(experiment, name), name


def test_texts_and_infinities_come_back_too(decoder: jaxtrain.Experiment, tmp_path: Path) -> None:
    tuning = FineTuning(
        FromHuggingFace("jax.numpy:float32"), ("json:dumps",), LoRA(2, 1.0, ("os:sep",))
    )
    sample = jaxtrain.Sample("json:dumps")
    given = replace(decoder, fine_tuning=tuning, evaluation=jaxtrain.Evaluation(sample=sample))
    (tmp_path / "config.json").write_text(json.dumps({"experiment": config_of(given)}))
    assert stored_field(tmp_path, "fine_tuning") == tuning
    assert stored_field(tmp_path, "evaluation") == given.evaluation


# Against `transformers`.


HEADS = dict(num_attention_heads=4, initializer_range=0.3)
THEIRS: dict[str, tuple[dict[str, int], dict[str, Any], tuple[str, ...]]] = {
    "Llama": ({"fsdp": 2}, {"num_key_value_heads": 2}, ("*.attention.*", "*.mlp.up")),
    "DeepseekV3": (
        {"expert": 2},
        {
            **{"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 12, "v_head_dim": 6},
            **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "moe_intermediate_size": 8},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
            "first_k_dense_replace": 1,
        },
        ("*.attention.*", "*.mlp.*"),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["Llama", pytest.param("DeepseekV3", marks=pytest.mark.slow)])
def test_merged_adapters_have_the_logits_of_transformers(
    decoder: jaxtrain.Experiment, tmp_path: Path, name: str
) -> None:
    """Of a model that it made: imported, trained by its adapters on a mesh, exported."""
    why = "compares with transformers; pip install '.[parity]'"
    torch: Any = pytest.importorskip("torch", reason=why)
    transformers: Any = pytest.importorskip("transformers", reason=why)
    torch.manual_seed(0)
    sizes = dict(vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
    axes, fields, targets = THEIRS[name]
    config = getattr(transformers, f"{name}Config")(**sizes, **HEADS, **fields)
    made = transformers.AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path / "folder")
    model = replace(jaxtrain.huggingface_config(tmp_path / "folder"), vocab_multiple=16)
    lora = LoRA(2, alpha=8.0, targets=targets)
    given = replace(
        decoder,
        model=model,
        fine_tuning=FineTuning(FromHuggingFace(tmp_path / "folder"), lora=lora),
        optimizer=jaxtrain.AdamW(3e-2),
        steps=3,
        checkpoints=jaxtrain.SavePolicy(every=1000),
    )
    trained(given, tmp_path, **axes, tensor=2)
    jaxtrain.export(tmp_path / "run", tmp_path / "out")
    ids = np.random.default_rng(0).integers(0, 16, (2, 12))

    def theirs(folder: Path) -> np.ndarray:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            return loaded(torch.tensor(ids)).logits.float().numpy()

    def ours(folder: Path) -> np.ndarray:
        found = load(folder)
        net = put_together(static_of(found.config), found.params)
        caches = net.empty_cache(*ids.shape, jnp.float32)
        with jax.default_matmul_precision("highest"):
            return net.decode(jnp.asarray(ids), caches, jnp.int32(0), comm=Local())[0][..., :16]

    np.testing.assert_allclose(ours(tmp_path / "run"), theirs(tmp_path / "out"), atol=1e-4)
    assert np.abs(theirs(tmp_path / "out") - theirs(tmp_path / "folder")).max() > 0.1
