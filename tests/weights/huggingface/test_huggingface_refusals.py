"""Folders that are not this model's, and writes that cannot be: nothing is read, or left."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_families import GPT2, LLAMA, MODELS, bits, random_params, template

from jaxtrain.huggingface import read_config, read_params, target, write_folder
from jaxtrain.huggingface.folder import Folder

Tensors = dict[str, np.ndarray]
TIED = replace(LLAMA, tied=True)
NORM, QUERY = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Folder, name: str, box: Any) -> np.ndarray:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Folder, "read", refuse)


def written(path: Path, config: Any = LLAMA) -> dict[str, jax.Array]:
    """A folder in one file; its parameters."""
    params = random_params(config, template(config))
    write_folder(path, config, params)
    return params


def change(folder: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


DAMAGES: list[tuple[Callable[[Tensors], Any], list[str]]] = [
    (lambda t: t.pop(NORM), [f"{NORM} [16] is missing"]),
    (lambda t: t.update(more=np.zeros(3)), ["more [3] is not in this model"]),
    (lambda t: t.update({QUERY: t[QUERY][:8]}), [f"{QUERY} is [8, 16], and [16, 16] in"]),
    (lambda t: t.update({NORM: np.ones(16, np.int8)}), [f"{NORM} is I8; the dtypes read are"]),
    (
        lambda t: t.update({EMBEDDING: t[EMBEDDING].T.copy(), QUERY + "x": t.pop(QUERY)}),
        [f"{EMBEDDING} is [16, 11]", f"{QUERY} [16, 16] is missing", f"{QUERY}x [16, 16] is not"],
    ),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_tensors_that_do_not_fit_are_all_named_and_none_is_read(
    tmp_path: Path, no_reading: None, damage: Callable[[Tensors], Any], said: list[str]
) -> None:
    written(tmp_path / "in")
    change(tmp_path / "in", damage)
    with pytest.raises(ValueError) as error:
        read_params(tmp_path / "in", LLAMA, template(LLAMA))
    assert all(each in str(error.value) for each in said), error.value
    assert str(error.value).count("\n- ") == len(said)


def bad_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = files[-1]
    path.write_text(json.dumps(index))


def no_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def truncated(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-1])


def named(path: str) -> Callable[[Path], None]:
    """An index with a path out of its folder, to a file that has just that tensor."""

    def damage(folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        content = json.loads(index.read_text())
        name = content["weight_map"][NORM]
        shutil.copy(folder / name, folder.parent / "x")
        given = str(folder.parent / "x") if path == "absolute" else path
        content["weight_map"] = {
            k: given if v == name else v for k, v in content["weight_map"].items()
        }
        index.write_text(json.dumps(content))

    return damage


def linked(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.rename(folder.parent / "x")
    file.symlink_to("../x")


def pipe(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[0]
    file.unlink()
    os.mkfifo(file)


FILES: list[tuple[Callable[[Path], Any], str]] = [
    *((named(path), "is no name of a file in") for path in ("../x", "absolute", "in/../../x")),
    (linked, "is a symbolic link out of its folder"),
    (pipe, "is a named pipe, and a file is expected there"),
    (lambda f: (f / "config.json").write_text("[" * 10**5), "nests more than 100 levels deep"),
    (bad_index, f"{NORM}: model.safetensors.index.json says it is in model-"),
    (no_index, "pytorch_model.bin is pickled"),
    (truncated, "-of-00004.safetensors cannot be opened"),
    (lambda f: sorted(f.glob("*.safetensors"))[0].unlink(), "model-00001-of-00004.safetensors"),
    (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
]


@pytest.mark.parametrize(("damage", "said"), FILES)
def test_files_that_do_not_fit_are_named(
    tmp_path: Path, no_reading: None, damage: Callable[[Path], Any], said: str
) -> None:
    write_folder(tmp_path / "in", LLAMA, random_params(LLAMA, template(LLAMA)), shard_bytes=4000)
    damage(tmp_path / "in")
    with pytest.raises(ValueError) as error:
        read_params(tmp_path / "in", LLAMA, template(LLAMA))
    assert said in str(error.value)


def bare(base: str) -> Callable[[Tensors], None]:
    """As the class without a head saves it."""

    def edit(tensors: Tensors) -> None:
        renamed = {name.removeprefix(base): tensors[name] for name in list(tensors)}
        tensors.clear()
        tensors.update(renamed)

    return edit


HARMLESS: list[tuple[str, Callable[[Tensors], Any]]] = [
    ("llama", lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2)})),
    ("llama tied", lambda t: t.update({HEAD: t[EMBEDDING]})),
    ("llama tied", lambda t: t.update({HEAD: t.pop(EMBEDDING)})),
    ("llama", bare("model.")),
    ("gpt2", bare("transformer.")),
    ("gpt2", lambda t: t.update({"transformer.h.1.attn.bias": np.ones((1, 1, 8, 8), bool)})),
    ("gpt2", lambda t: t.update({"transformer.h.0.attn.masked_bias": np.ones(())})),
]


@pytest.mark.parametrize(("name", "edit"), HARMLESS)
def test_what_older_versions_save_besides_is_no_mistake(
    tmp_path: Path, name: str, edit: Callable[[Tensors], Any]
) -> None:
    config = MODELS[name][1]
    params = written(tmp_path / "in", config)
    change(tmp_path / "in", edit)
    found = read_params(tmp_path / "in", config, template(config, fsdp=2))
    assert all(bits(found[path]) == bits(leaf) for path, leaf in params.items())


def test_a_tied_table_that_differs_from_its_copy_is_refused(tmp_path: Path) -> None:
    """`transformers` would untie them."""
    written(tmp_path / "in", TIED)
    change(tmp_path / "in", lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        read_params(tmp_path / "in", TIED, template(TIED))
    change(tmp_path / "in", lambda t: t.update({HEAD: t[HEAD][:5]}))
    with pytest.raises(ValueError, match=r"lm_head\.weight is \[5, 16\], and \[11, 16\]"):
        read_params(tmp_path / "in", TIED, template(TIED))


def test_a_template_of_another_model_is_refused(tmp_path: Path, no_reading: None) -> None:
    written(tmp_path / "in")
    wanted = template(LLAMA)
    wanted["more"] = wanted.pop("norm.scale")
    wanted["embedding"] = jax.ShapeDtypeStruct((3, 4), jnp.int32)
    with pytest.raises(ValueError) as error:
        read_params(tmp_path / "in", LLAMA, wanted)
    for said in (
        "norm.scale is missing",
        "more is no parameter",
        "embedding is (3, 4), and (16, 16)",
        "embedding is int32; use a float",
        "embedding has no sharding",
    ):
        assert said in str(error.value)


def leaf(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


BAD_PARAMS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"norm.scale": None}, {}, ["parameter norm.scale is missing"]),
    ({"more": leaf((2,))}, {}, ["more is no parameter"]),
    (
        {"norm.scale": leaf((3,)), "head": None},
        {},
        ["norm.scale is (3,), and (16,)", "parameter head is missing"],
    ),
    ({"norm.scale": leaf((16,), jnp.bfloat16)}, {}, ["dtype is bfloat16 and float32; give one of"]),
    ({}, {"dtype": "int8"}, ["dtype is int8; give one of float32, bfloat16, float16"]),
    ({"norm.scale": jnp.full((16,), 1e6)}, {"dtype": "float16"}, [f"{NORM} has weights beyond"]),
]


@pytest.mark.parametrize(("changes", "options", "said"), BAD_PARAMS)
def test_parameters_of_another_model_are_refused_and_nothing_is_left(
    tmp_path: Path, changes: dict[str, Any], options: dict[str, Any], said: list[str]
) -> None:
    params = {**random_params(LLAMA, template(LLAMA)), **changes}
    params = {path: value for path, value in params.items() if value is not None}
    with pytest.raises(ValueError) as error:
        write_folder(tmp_path / "out", LLAMA, params, **options)
    assert all(each in str(error.value) for each in said), error.value
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_not_written_over(tmp_path: Path) -> None:
    params = random_params(GPT2, template(GPT2))
    write_folder(tmp_path, GPT2, params)  # an empty one is as good as none
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match="is there already; remove it or give a new folder"):
        write_folder(tmp_path, GPT2, params)
    assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_midway_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    save, calls = target.save_file, []

    def failing(tensors: Tensors, path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise error
        save(tensors, path, **options)

    monkeypatch.setattr(target, "save_file", failing)
    params = random_params(LLAMA, template(LLAMA))
    kind = ValueError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind, match="No space left" if kind is ValueError else None):
        write_folder(tmp_path / "out", LLAMA, params, shard_bytes=2000)
    assert len(calls) == 2 and list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target.shutil, "disk_usage", lambda path: type("U", (), {"free": 1000}))
    with pytest.raises(ValueError, match=r"needs [\d,]+ bytes and 1,000 are free"):
        write_folder(tmp_path / "out", LLAMA, random_params(LLAMA, template(LLAMA)))
    assert list(tmp_path.iterdir()) == []


def test_a_config_read_from_a_written_folder_takes_its_weights(tmp_path: Path) -> None:
    """Without a word of ours between them."""
    params = written(tmp_path / "in", MODELS["qwen 2 windows"][1])
    config = replace(read_config(tmp_path / "in"), vocab_multiple=16)
    found = read_params(tmp_path / "in", config, template(config, fsdp=4))
    # Folded another way: the last two of four layers are one stack now.
    assert len(config.prefix) == 1 and config.periods == 3
    last = [params["period.0.mlp.up"][i] for i in range(2)] + [params["suffix.0.mlp.up"]]
    assert bits(found["period.0.mlp.up"]) == b"".join(map(bits, last))
