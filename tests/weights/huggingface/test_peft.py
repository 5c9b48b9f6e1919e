"""Adapters in and out of folders of `peft`: where they lie, what is refused, how a run goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_adapters import RANK, adapters_of, every_matrix, shapes
from tiny_families import LLAMA, MODELS, bits, random_params, template

from jaxtrain import LoRA, huggingface_config
from jaxtrain.huggingface import huggingface_lora, write_folder
from jaxtrain.huggingface.peft import read_adapters
from jaxtrain.huggingface.peft_write import write_adapters

TARGETS = ("period.0.attention.query", "period.0.mlp.down")
SHARDED = {"data": 2, "fsdp": 2, "tensor": 2}


def test_llamas_lie_as_peft_has_them(tmp_path: Path) -> None:
    """A [rank, in] and B [out, rank] of each layer, under the module's name."""
    params = adapters_of(LLAMA, TARGETS)
    write_adapters(tmp_path / "lora", LLAMA, params, alpha=6.0, base="llama")
    found = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    names = {"self_attn.q_proj": "attention.query", "mlp.down_proj": "mlp.down"}
    expected = {
        f"base_model.model.model.layers.{layer}.{name}.lora_{part.upper()}.weight": np.asarray(
            params[f"period.0.{leaf}_lora_{part}"]
        )[layer].T
        for layer in range(2)
        for name, leaf in names.items()
        for part in "ab"
    }
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)
    fields = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert fields == {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "llama"},
        **{"r": RANK, "lora_alpha": 6.0, "lora_dropout": 0.0, "bias": "none"},
        **{"target_modules": ["mlp.down_proj", "self_attn.q_proj"], "fan_in_fan_out": False},
        **{"inference_mode": True, "init_lora_weights": True},
    }


def test_dtype_base_and_layout_are_told(tmp_path: Path) -> None:
    """GPT-2's matrices are [in, out] in its folder, which `peft` wants to know."""
    config = MODELS["gpt2"][1]
    params = adapters_of(config, ("period.0.mlp.up",))
    write_adapters(tmp_path / "lora", config, params, alpha=6.0, dtype="bfloat16")
    fields = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (fields["base_model_name_or_path"], fields["fan_in_fan_out"]) == (None, True)
    found = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert {str(array.dtype) for array in found.values()} == {"bfloat16"}


def test_what_is_written_is_what_merging_adds(tmp_path: Path) -> None:
    """In every family: B A as `peft` multiplies them is the matrix of a model whose own is A B."""
    for name, (family, config) in MODELS.items():
        every = every_matrix(config)
        targets = tuple(k for k in every if k not in unwritable(family, every))
        adapters = adapters_of(config, targets)
        params = random_params(config, template(config))
        for path in targets:
            a, b = (np.asarray(adapters[f"{path}_lora_{part}"]) for part in "ab")
            params[path] = jnp.asarray(a @ b)
        write_folder(tmp_path / name / "merged", config, params)
        write_adapters(tmp_path / name / "lora", config, adapters, alpha=3.0)
        merged = load_file(tmp_path / name / "merged" / "model.safetensors")
        found = load_file(tmp_path / name / "lora" / "adapter_model.safetensors")
        modules = {k.rpartition(".lora_")[0] for k in found}
        assert len(modules) == len(found) // 2 >= len(targets)
        for module in modules:
            product = found[f"{module}.lora_B.weight"] @ found[f"{module}.lora_A.weight"]
            weight = merged[module.removeprefix("base_model.model.") + ".weight"]
            weight = weight.T if family == "gpt2" else weight
            np.testing.assert_allclose(product, weight, atol=1e-5, err_msg=f"{name}: {module}")


WRONG: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no adapters": (lambda p: p.clear(), "has no adapters to write; export its weights"),
    "no B": (lambda p: p.pop(f"{TARGETS[0]}_lora_b"), f"parameter {TARGETS[0]}_lora_b is missing"),
    "another shape": (
        lambda p: p.update({f"{TARGETS[0]}_lora_b": jnp.zeros((2, RANK, 15))}),
        r"query_lora_b is \(2, 3, 15\), and \(2, 3, 16\) in the model",
    ),
    "two ranks": (
        lambda p: p.update({f"{TARGETS[0]}_lora_a": jnp.zeros((2, 16, RANK - 1))}),
        r"query_lora_a is \(2, 16, 2\), and \(2, 16, 3\) in the model",
    ),
    "no matrix": (
        lambda p: p.update({"period.0.mlp.x_lora_a": jnp.zeros((2, 16, RANK))}),
        "period.0.mlp.x is no matrix of this model that can have an adapter",
    ),
    "the head": (
        lambda p: p.update(head_lora_a=jnp.zeros((16, RANK))),
        "head is no matrix of this model that can have an adapter",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_are_not_the_models_adapters_are_not_written(name: str, tmp_path: Path) -> None:
    params = adapters_of(LLAMA, TARGETS)
    change, told = WRONG[name]
    change(params)
    with pytest.raises(ValueError, match=told):
        write_adapters(tmp_path / "lora", LLAMA, params, alpha=6.0)
    assert not (tmp_path / "lora").exists()


def test_adapters_are_written_in_a_dtype_of_folders_or_not_at_all(tmp_path: Path) -> None:
    for dtype in ("int8", "float64", "nonsense"):
        with pytest.raises(ValueError, match=f"dtype is .?{dtype}.?; give one of float32"):
            write_adapters(
                tmp_path / "lora", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0, dtype=dtype
            )
    assert not (tmp_path / "lora").exists()


SHARED = {  # matrices that lie in one tensor with others
    "gpt2": ("query", "key", "value"),
    "phi3": ("query", "key", "value", "mlp.gate", "mlp.up"),
}


def unwritable(family: str, every: tuple[str, ...]) -> dict[str, str]:
    """What `peft` 0.21 leaves out, as seen with each of these families: matrix -> why."""
    routers = {path for path in every if path.endswith("router")}
    of_experts = {
        router.replace("router", part) for router in routers for part in ("gate", "up", "down")
    }
    shared = {path: "shares " for path in every if path.endswith(SHARED.get(family, ()) or "?")}
    if family == "qwen2_moe":
        return dict.fromkeys(of_experts | routers, "is of experts, which it does not find")
    if family == "mixtral" or not routers:
        return shared
    mlps = {path for path in every if ".mlp." in path} - of_experts - routers
    return dict.fromkeys(mlps, "which it takes for the experts' own")


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_to_the_bit_on_any_mesh(name: str, tmp_path: Path) -> None:
    """All matrices of the model, but for those that `peft` could not tell apart."""
    family, config = MODELS[name]
    every = every_matrix(config)
    refused = unwritable(family, every)
    if refused:
        with pytest.raises(ValueError) as told:
            write_adapters(tmp_path / "lora", config, adapters_of(config, every), alpha=6.0)
        lines = str(told.value).splitlines()[1:-1]
        assert {line.split()[1] for line in lines} == refused.keys()
        assert all(refused[line.split()[1]] in line for line in lines)
    targets = tuple(k for k in every if k not in refused)
    params = adapters_of(config, targets)
    write_adapters(tmp_path / "lora", config, params, alpha=6.0)
    lora = huggingface_lora(tmp_path / "lora", config)
    assert lora == LoRA(RANK, 6.0, lora.targets) and {*lora.targets} == {*targets}
    for axes in ({}, SHARDED):
        back = read_adapters(
            tmp_path / "lora", config, shapes(adapters_of(config, targets, **axes))
        )
        assert back.keys() == params.keys()
        assert all(bits(back[k]) == bits(params[k]) for k in params)


def test_gate_and_up_of_experts_go_together(tmp_path: Path) -> None:
    """`transformers` 5 has them in one matrix, and `peft` converts both or none."""
    config = MODELS["mixtral"][1]
    for part, other in (("gate", "up"), ("up", "gate")):
        alone = adapters_of(config, (f"period.0.mlp.{part}", "period.0.mlp.down"))
        with pytest.raises(ValueError, match=f"mlp.{part} is fused with period.0.mlp.{other}"):
            write_adapters(tmp_path / "lora", config, alone, alpha=6.0)
    dense = adapters_of(LLAMA, ("period.0.mlp.up",))
    write_adapters(tmp_path / "lora", LLAMA, dense, alpha=6.0)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def fields(**changes: Any) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        found = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps({**found, **changes}))

    return change


def tensors(act: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        act(found)
        save_file(found, folder / WEIGHTS)

    return change


def more(name: str, like: str = "") -> Callable[[Path], Any]:
    return tensors(lambda found: found.update({name: found[like or QUERY]}))


MODULE = "base_model.model.model.layers.1.self_attn.q_proj"
QUERY = f"{MODULE}.lora_A.weight"
FIX = "; a plain LoRA has .*(?s:.)*merge_and_unload"
REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no object": (lambda folder: (folder / CONFIG).write_text("[]"), "holds a list; use an object"),
    "no text": (lambda folder: (folder / CONFIG).write_text("{"), f"{CONFIG} cannot be read"),
    "no method": (fields(peft_type=None), f"- peft_type=None{FIX}"),
    "another method": (fields(peft_type="LOHA"), f"- peft_type='LOHA'{FIX}"),
    "biases": (fields(bias="all"), f"- bias='all'{FIX}"),
    "PiSSA": (fields(init_lora_weights="pissa"), f"- init_lora_weights='pissa'{FIX}"),
    "a text": (fields(use_rslora="true"), f"- use_rslora='true'{FIX}"),
    "DoRA": (fields(use_dora=True), f"- use_dora=True is not known here{FIX}"),
    "KaSA": (fields(kasa_config={"a": 1}), f"- kasa_config={{'a': 1}} is not known here{FIX}"),
    "experts": (
        fields(target_parameters=["up"]),
        f"- target_parameters=.'up'. is not known here{FIX}",
    ),
    "ranks": (fields(rank_pattern={"q_proj": 9}), f"- rank_pattern=.*9. is not known here{FIX}"),
    "tables": (fields(modules_to_save=["lm_head"]), f"- modules_to_save=.*is not known here{FIX}"),
    "to come": (fields(use_tomorrow=True), f"- use_tomorrow=True is not known here{FIX}"),
    "no rank": (fields(r=0), "(?s)- r=0 must be [^\n]*$"),
    "no numbers": (
        fields(r=0, lora_alpha="1", use_dora=True),
        "(?s)use_dora=True.*\n- r=0 must be .*\n- lora_alpha='1' must be [^\n]*\n- for other",
    ),
    "another rank": (fields(r=4), r"q_proj.lora_A.weight is \[3, 16\], and \[4, 16\] in this"),
    "some layers": (
        tensors(lambda t: [t.pop(k) for k in list(t) if k.startswith(MODULE)]),
        r"(?s)layers.1.self_attn.q_proj.lora_A.weight \[3, 16\] is missing.*"
        r"dataclasses.replace\(model, period=model.period \* 2\)",
    ),
    "another matrix": (
        more(QUERY.replace("q_proj", "b_proj")),
        r"layers.1.self_attn.b_proj.lora_A.weight is of no matrix of this model",
    ),
    "the head": (
        more("base_model.model.lm_head.lora_A.weight"),
        "base_model.model.lm_head.lora_A.weight is of head, which can have no adapter here",
    ),
    "the embedding": (
        more("base_model.model.model.embed_tokens.lora_embedding_A"),
        "model.embed_tokens.lora_embedding_A is of embedding, which can have no adapter here",
    ),
    "a whole table": (
        more("base_model.model.lm_head.weight"),
        "- base_model.model.lm_head.weight is no adapter: a whole tensor",
    ),
    "other names": (
        more("model.layers.1.mlp.up_proj.lora_A.weight"),
        "- model.layers.1.mlp.up_proj.lora_A.weight does not begin with base_model.model., as",
    ),
    "nothing": (tensors(lambda t: t.clear()), f"{WEIGHTS} has no adapter of a matrix of this"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), f"lora has no {WEIGHTS}$"),
    "pickled": (
        lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model.bin"),
        f"has no {WEIGHTS}; adapter_model.bin is pickled: save it as safetensors",
    ),
    "no config": (lambda folder: (folder / CONFIG).unlink(), "give a folder as `peft` saves it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_lora_of_this_model_is_refused(name: str, tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    change, told = REFUSED[name]
    change(tmp_path / "lora")
    with pytest.raises(ValueError, match=told) as refused:
        huggingface_lora(tmp_path / "lora", LLAMA)
    assert len(str(refused.value).splitlines()) < 14
    if name not in ("another rank", "nothing"):  # where it reads what the tensors are
        with pytest.raises(ValueError, match=told):
            read_adapters(tmp_path / "lora", LLAMA, shapes(adapters_of(LLAMA, TARGETS)))


def test_many_faults_are_counted(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    for number in range(12):
        more(f"base_model.model.{number}")(tmp_path / "lora")
    with pytest.raises(ValueError, match="- and 2 more of such lines\n- for other") as refused:
        huggingface_lora(tmp_path / "lora", LLAMA)
    assert str(refused.value).count("is no adapter: a whole tensor") == 10


def test_adapters_of_some_layers_fit_a_model_with_layers_apart(tmp_path: Path) -> None:
    """As the refusal says."""
    write_adapters(tmp_path / "lora", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    REFUSED["some layers"][0](tmp_path / "lora")
    apart = replace(LLAMA, period=LLAMA.period * 2)
    lora = huggingface_lora(tmp_path / "lora", apart)
    assert lora.targets == (TARGETS[0], TARGETS[1], "period.1.mlp.down")
    back = read_adapters(tmp_path / "lora", apart, shapes(adapters_of(apart, lora.targets)))
    with pytest.raises(ValueError, match=r"layers.1.self_attn.q_proj.* is missing") as refused:
        wanted = shapes(adapters_of(apart, (*lora.targets, "period.1.attention.query")))
        read_adapters(tmp_path / "lora", apart, wanted)
    assert "dataclasses.replace" not in str(refused.value)
    whole = adapters_of(LLAMA, TARGETS)
    np.testing.assert_array_equal(
        back["period.1.mlp.down_lora_a"][0], whole["period.0.mlp.down_lora_a"][1]
    )


def test_one_module_of_several_matrices_is_named_with_them(tmp_path: Path) -> None:
    """`peft` adapts GPT-2's c_attn, if it is not told otherwise."""
    config = MODELS["gpt2"][1]
    targets = ("period.0.mlp.up",)
    write_adapters(tmp_path / "lora", config, adapters_of(config, targets), alpha=6.0)
    name = "base_model.model.transformer.h.0.{}.lora_A.weight"
    more(name.format("attn.c_attn"), name.format("mlp.c_fc"))(tmp_path / "lora")
    told = (
        "attn.c_attn.lora_A.weight is of several matrices here, in one: "
        "period.0.attention.query, period.0.attention.key, period.0.attention.value"
    )
    with pytest.raises(ValueError, match=told):
        huggingface_lora(tmp_path / "lora", config)


def test_what_a_folder_is_instead_is_told(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", LLAMA, random_params(LLAMA, template(LLAMA)))
    write_adapters(tmp_path / "two" / "mine", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    told = {
        "model": "it is a model's folder: FromHuggingFace",
        "two": "the folder of one adapter, such as .*two/mine",
        "run": "it is a run; `jaxtrain export RUN --adapters",
        "nowhere": "there is no such folder",
    }
    for name, why in told.items():
        with pytest.raises(ValueError, match=f"{name} has no {CONFIG}: .*{why}"):
            huggingface_lora(tmp_path / name, LLAMA)
    with pytest.raises(ValueError, match="has adapters of `peft`; give their base model's folder"):
        huggingface_config(tmp_path / "two" / "mine")
    with pytest.raises(ValueError, match="holds the weights of a DecoderConfig"):
        huggingface_lora(tmp_path / "two" / "mine", "model")  # type: ignore[arg-type]


def test_layers_that_alone_have_an_adapter_are_named_whole(tmp_path: Path) -> None:
    """`peft` selects modules by the ends of their names, here one layer of two has none."""
    config = MODELS["gemma 2"][1]
    targets = every_matrix(config, "period.1.attention.query", "period.*.mlp.up")
    params = adapters_of(config, targets)
    write_adapters(tmp_path / "lora", config, params, alpha=6.0)
    fields = json.loads((tmp_path / "lora" / CONFIG).read_text())
    layers = [f"model.layers.{i}.self_attn.q_proj" for i in (1, 3)]
    assert fields["target_modules"] == ["mlp.up_proj", *layers]


def test_adapters_that_are_not_trained_are_refused(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    told = "down_proj.lora_A.weight is not trained by these targets"
    with pytest.raises(ValueError, match=told):
        read_adapters(tmp_path / "lora", LLAMA, shapes(adapters_of(LLAMA, TARGETS[:1])))


def test_empty_fields_that_are_not_known_are_none_of_a_problem(tmp_path: Path) -> None:
    """`peft` writes all its fields."""
    write_adapters(tmp_path / "lora", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    expected = huggingface_lora(tmp_path / "lora", LLAMA)
    empty = {"use_dora": False, "kasa_config": None, "loftq_config": {}, "modules_to_save": []}
    fields(**empty, layers_to_transform=[0, 1], lora_dropout=0.1)(tmp_path / "lora")
    assert huggingface_lora(tmp_path / "lora", LLAMA) == expected


def test_rank_stabilised_adapters_are_scaled_by_the_root_of_the_rank(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    fields(use_rslora=True)(tmp_path / "lora")
    assert huggingface_lora(tmp_path / "lora", LLAMA).alpha / RANK == pytest.approx(6.0 / 3**0.5)


def test_adapters_of_the_class_without_a_head_are_found(tmp_path: Path) -> None:
    write_adapters(tmp_path / "lora", LLAMA, adapters_of(LLAMA, TARGETS), alpha=6.0)
    whole = huggingface_lora(tmp_path / "lora", LLAMA)

    def rename(found: dict[str, Any]) -> None:
        for name in list(found):
            found[name.replace("model.model.model.", "model.model.")] = found.pop(name)

    tensors(rename)(tmp_path / "lora")
    assert huggingface_lora(tmp_path / "lora", LLAMA) == whole
