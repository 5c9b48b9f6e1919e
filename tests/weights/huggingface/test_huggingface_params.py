"""Parameters in and out of folders: bits, shardings, padding, and what is read of a file."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tiny_families import GPT2, LLAMA, MODELS, bits, random_params, template

from jaxtrain import MoeConfig
from jaxtrain.huggingface import read_params, write_folder
from jaxtrain.huggingface.folder import Folder
from jaxtrain.mesh.sharding import named_sharding

SHARDED = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.fixture
def boxes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What is read from now on: (tensor, box)."""
    found: list[tuple[str, Any]] = []
    read = Folder.read

    def noted(self: Folder, name: str, box: Any) -> np.ndarray:
        found.append((name, box))
        return read(self, name, box)

    monkeypatch.setattr(Folder, "read", noted)
    return found


def stored(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a folder by the library's own reader, each in one file only."""
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    names = Counter(name for file in files for name in file)
    assert set(names.values()) == {1}
    return {name: array for file in files for name, array in file.items()}


def test_llama_lies_as_its_authors_have_it(tmp_path: Path) -> None:
    """Torch's Linear keeps [out, in]; every layer has tensors of its own."""
    where = template(LLAMA, **SHARDED)
    params = random_params(LLAMA, where)
    write_folder(tmp_path / "out", LLAMA, params, max_seq=64, eos=3)
    theirs, ours = stored(tmp_path / "out"), {k: np.asarray(v) for k, v in params.items()}
    names = {
        "self_attn.q_proj": "attention.query",
        "self_attn.k_proj": "attention.key",
        "self_attn.v_proj": "attention.value",
        "self_attn.o_proj": "attention.out",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
    }
    expected = {
        "model.embed_tokens.weight": ours["embedding"][:11],
        "lm_head.weight": ours["head"][:11],
        "model.norm.weight": ours["norm.scale"],
    }
    for layer in range(2):
        at = f"model.layers.{layer}."
        for name, leaf in names.items():
            expected[f"{at}{name}.weight"] = ours[f"period.0.{leaf}"][layer].T
        norms = (ours[f"period.0.{n}_norm.scale"][layer] for n in ("attention", "mlp"))
        (
            expected[f"{at}input_layernorm.weight"],
            expected[f"{at}post_attention_layernorm.weight"],
        ) = norms
    assert theirs.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(theirs[name], array, err_msg=name)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["max_position_embeddings"] == 64 and fields["eos_token_id"] == 3
    assert fields["torch_dtype"] == "float32" and fields["architectures"] == ["LlamaForCausalLM"]


def test_gpt2_has_queries_keys_and_values_in_one(tmp_path: Path) -> None:
    """c_attn is [embed, 3 embed], its columns q, then k, then v (Radford's own code splits it so);
    Conv1D keeps [in, out]."""
    params = random_params(GPT2, template(GPT2, fsdp=2, tensor=4))
    write_folder(tmp_path / "out", GPT2, params)
    theirs, ours = stored(tmp_path / "out"), {k: np.asarray(v) for k, v in params.items()}
    for layer in range(2):
        at = f"transformer.h.{layer}."
        for column, leaf in enumerate(("query", "key", "value")):
            mine = slice(16 * column, 16 * (column + 1))
            weight = theirs[f"{at}attn.c_attn.weight"][:, mine]
            np.testing.assert_array_equal(weight, ours[f"period.0.attention.{leaf}"][layer])
            bias = theirs[f"{at}attn.c_attn.bias"][mine]
            np.testing.assert_array_equal(bias, ours[f"period.0.attention.{leaf}_bias"][layer])
        for name, leaf in (
            ("attn.c_proj.weight", "attention.out"),
            ("attn.c_proj.bias", "attention.out_bias"),
            ("mlp.c_fc.weight", "mlp.up"),
            ("mlp.c_fc.bias", "mlp.up_bias"),
            ("mlp.c_proj.weight", "mlp.down"),
            ("mlp.c_proj.bias", "mlp.down_bias"),
            ("ln_1.weight", "attention_norm.scale"),
            ("ln_1.bias", "attention_norm.bias"),
            ("ln_2.weight", "mlp_norm.scale"),
            ("ln_2.bias", "mlp_norm.bias"),
        ):
            np.testing.assert_array_equal(theirs[at + name], ours[f"period.0.{leaf}"][layer])
    np.testing.assert_array_equal(theirs["transformer.wte.weight"], ours["embedding"][:11])
    np.testing.assert_array_equal(theirs["transformer.wpe.weight"], ours["positions"])
    np.testing.assert_array_equal(theirs["transformer.ln_f.weight"], ours["norm.scale"])
    np.testing.assert_array_equal(theirs["transformer.ln_f.bias"], ours["norm.bias"])
    assert len(theirs) == 2 * 12 + 4, "tied: no head"


def test_mixtral_has_a_tensor_for_every_matrix_of_every_expert(tmp_path: Path) -> None:
    """w1 is the gate, w3 goes up and w2 down, as its authors' code names them."""
    config = MODELS["mixtral"][1]
    params = random_params(config, template(config, fsdp=2, tensor=2))
    write_folder(tmp_path / "out", config, params)
    theirs, ours = stored(tmp_path / "out"), {k: np.asarray(v) for k, v in params.items()}
    for layer in range(2):
        at = f"model.layers.{layer}.block_sparse_moe."
        router = ours["period.0.mlp.router"][layer]
        np.testing.assert_array_equal(theirs[f"{at}gate.weight"], router.T)
        for expert in range(4):
            for name, leaf in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
                matrix = ours[f"period.0.mlp.{leaf}"][layer, expert]
                np.testing.assert_array_equal(
                    theirs[f"{at}experts.{expert}.{name}.weight"], matrix.T
                )
    assert len(theirs) == 2 * (4 + 2 + 1 + 3 * 4) + 3
    assert not any("mlp." in name for name in theirs)


def fused(folder: Path, experts: int) -> None:
    """The tensors as version 5 of `transformers` has them in memory."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        old, new = (f"model.layers.{layer}.{name}." for name in ("block_sparse_moe", "mlp"))
        tensors[f"{new}gate.weight"] = tensors.pop(f"{old}gate.weight")
        gate, up, down = (
            np.stack([tensors.pop(f"{old}experts.{e}.{w}.weight") for e in range(experts)])
            for w in ("w1", "w3", "w2")
        )
        tensors[f"{new}experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{new}experts.down_proj"] = down
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("axes", [{"data": 1}, SHARDED, {"fsdp": 8}])
def test_fused_experts_are_read_too(tmp_path: Path, axes: dict[str, int]) -> None:
    config = MODELS["mixtral"][1]
    params = random_params(config, template(config))
    write_folder(tmp_path / "out", config, params)
    fused(tmp_path / "out", experts=4)
    found = read_params(tmp_path / "out", config, template(config, **axes))
    for path, leaf in found.items():
        assert bits(leaf) == bits(params[path]), path
    more = replace(config, period=(replace(config.period[0], mlp=MoeConfig(12, experts=5)),))
    with pytest.raises(ValueError, match=r"gate_up_proj is \[4, 24, 16\], and \[5, 24, 16\]"):
        read_params(tmp_path / "out", more, template(more))


ROUND_TRIPS = [
    *((name, {"fsdp": 2, "tensor": 2}, {"data": 1}) for name in MODELS),
    ("llama", {"data": 1}, {"fsdp": 4, "tensor": 2}),
    ("gpt2", SHARDED, {"tensor": 4}),
    ("qwen 2 windows", {"fsdp": 8}, SHARDED),
]


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [x if i % 2 else pytest.param(*x, marks=pytest.mark.slow) for i, x in enumerate(ROUND_TRIPS)],
)
@pytest.mark.sampled(3)
def test_what_was_written_is_read_to_the_bit(
    tmp_path: Path, name: str, before: dict[str, int], after: dict[str, int]
) -> None:
    """From one mesh to another, over as many files as there are tensors or in one."""
    config = MODELS[name][1]
    params = random_params(config, template(config, **before))
    write_folder(tmp_path / "out", config, params, shard_bytes=2000)
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    where = template(config, **after)
    found = read_params(tmp_path / "out", config, where)
    assert found.keys() == params.keys()
    for path, leaf in found.items():
        assert leaf.sharding == where[path].sharding and leaf.dtype == jnp.float32
        assert bits(leaf) == bits(params[path]), path


def test_layers_may_lie_on_different_devices(tmp_path: Path) -> None:
    """As in a pipeline."""
    config = replace(LLAMA, layers=4)
    where = {}
    for path, leaf in template(config, fsdp=2).items():
        layers = ("fsdp",) if path.startswith("period.") else ()
        split = (layers, *((),) * (len(leaf.shape) - 1))
        sharding = named_sharding(leaf.sharding.mesh, split)
        where[path] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    params = random_params(config, where)
    write_folder(tmp_path / "out", config, params)
    for wanted in (where, template(config)):
        found = read_params(tmp_path / "out", config, wanted)
        assert all(bits(found[path]) == bits(leaf) for path, leaf in params.items())


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("written", ["float32", "bfloat16", "float16", None])
def test_dtypes_are_cast_once_and_rounded_to_nearest(
    tmp_path: Path, held: str, written: str | None
) -> None:
    params = random_params(GPT2, template(GPT2, jnp.dtype(held), fsdp=2))
    write_folder(tmp_path / "out", GPT2, params, dtype=written)
    dtype = jnp.dtype(written or held)
    with safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        kinds = {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    assert kinds == {{"float32": "F32", "bfloat16": "BF16", "float16": "F16"}[dtype.name]}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype.name
    for wanted in (jnp.float32, jnp.bfloat16):
        found = read_params(tmp_path / "out", GPT2, template(GPT2, wanted, tensor=2))
        for path, leaf in found.items():
            expected = np.asarray(params[path]).astype(dtype).astype(wanted)
            assert leaf.dtype == wanted and bits(leaf) == bits(expected), path


def test_padded_rows_are_zero_and_not_in_the_folder(tmp_path: Path) -> None:
    """Another multiple pads the same folder anew."""
    params = random_params(LLAMA, template(LLAMA))
    write_folder(tmp_path / "out", LLAMA, params)
    assert stored(tmp_path / "out")["lm_head.weight"].shape == (11, 16)
    wider = replace(LLAMA, vocab_multiple=64)
    # Over tensor=4 three of four shards are all padding.
    found = read_params(tmp_path / "out", wider, template(wider, tensor=4))
    for path in ("embedding", "head"):
        assert found[path].shape == (64, 16) and not np.asarray(found[path])[11:].any()
        assert bits(found[path][:11]) == bits(params[path][:11])


@pytest.mark.parametrize("axes", [SHARDED, {"fsdp": 8}, {"tensor": 2}, {"data": 8}])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen 2 windows", "mixtral"])
def test_every_element_is_read_once_and_no_shard_is_more_than_asked_for(
    tmp_path: Path, boxes: list[tuple[str, Any]], name: str, axes: dict[str, int]
) -> None:
    """However many devices hold it."""
    config = MODELS[name][1]
    write_folder(tmp_path / "out", config, random_params(config, template(config)))
    where = template(config, **axes)
    read_params(tmp_path / "out", config, where)
    counts = {k: np.zeros(v.shape, int) for k, v in stored(tmp_path / "out").items()}
    largest = max(math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in where.values())
    for tensor, box in boxes:
        counts[tensor][tuple(slice(*dim) for dim in box)] += 1
        assert math.prod(b - a for a, b in box) <= largest
    for tensor, count in counts.items():
        assert (count == 1).all(), tensor


def test_files_are_no_larger_than_asked_for(tmp_path: Path) -> None:
    params = random_params(LLAMA, template(LLAMA))
    write_folder(tmp_path / "out", LLAMA, params, shard_bytes=1100)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    sizes = []
    for file in files:
        arrays = load_file(tmp_path / "out" / file)
        mine = [name for name, where in index["weight_map"].items() if where == file]
        assert set(mine) == set(arrays)
        sizes.append([array.nbytes for array in arrays.values()])
    assert all(sum(each) <= 1100 or len(each) == 1 for each in sizes)
    full = (sum(a) + max(b) > 1100 for a, b in pairwise(sizes))
    assert all(full), "none is split for nothing"
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    for path in (tmp_path / "out").iterdir():
        assert path.stat().st_mode & 0o444 == 0o444, "others may read what is handed on"
