"""A tokenizer beside weights: how its texts begin and end, and what of it is handed on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import jaxtrain
from jaxtrain.data import ByteTokenizer, TokenizerFile
from jaxtrain.tokenizers import HuggingFaceVocabulary
from jaxtrain.weights.tokenizer_files import folder_tokenizer, record_beginning, tokenizer_files

IDS = {"a": 0, "<s>": 1, "</s>": 2, "?": 3, "<end>": 4, "<pad>": 5}


def tokenizer(*, adds: bool) -> str:
    found = Tokenizer(models.WordLevel(IDS, unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()
    found.add_special_tokens(["<s>", "</s>", "<end>", "<pad>"])
    if adds:
        found.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    return found.to_str()


def written(folder: Path, *, adds: bool, told: Any, config: Any, generation: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer(adds=adds))
    (folder / "config.json").write_text(json.dumps(config))
    for name, said in (("tokenizer", told), ("generation", generation)):
        if said is not None:
            (folder / f"{name}_config.json").write_text(json.dumps(said))
    return folder


ENDS = [
    ({"eos_token": "</s>"}, {}, None, 2, {2}),
    ({"eos_token": {"content": "</s>", "lstrip": False}}, {"eos_token_id": 1}, None, 2, {1, 2}),
    (None, {"eos_token_id": 2}, None, 2, {2}),
    (None, {}, {"eos_token_id": 2}, 2, {2}),
    ({"add_bos_token": False}, {"eos_token_id": [1, 2]}, None, 1, {1, 2}),
    ({"eos_token": "</s>"}, {"eos_token_id": [2, 4]}, {"eos_token_id": [4, 5]}, 2, {2, 4, 5}),
    ({"eos_token": "</s>"}, {"eos_token_id": None}, {"eos_token_id": 4}, 2, {2, 4}),
]


@pytest.mark.parametrize(("told", "config", "generation", "eos", "ends"), ENDS)
def test_a_text_ends_where_any_file_of_the_folder_says(
    told: Any, config: Any, generation: Any, eos: int, ends: set[int], tmp_path: Path
) -> None:
    folder = written(tmp_path, adds=False, told=told, config=config, generation=generation)
    found = folder_tokenizer(folder)
    assert found is not None and found.vocabulary.decode([0, found.vocabulary.eos]) == "a"
    assert (found.vocabulary.eos, found.ends) == (eos, ends)


def test_a_folder_that_says_no_end_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path, adds=False, told={}, config={"eos_token_id": 99})
    with pytest.raises(ValueError, match=r"neither eos_token in .* or generation_config\.json"):
        folder_tokenizer(folder)


LLAMA, QWEN = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
BEGINS = [
    (False, {}, {**LLAMA, "bos_token_id": 1}, 1),
    (False, {}, LLAMA, None),
    (False, {"add_bos_token": False}, {**LLAMA, "bos_token_id": 1}, None),
    (False, {}, {**QWEN, "bos_token_id": 1}, None),
    (False, {"tokenizer_class": "PreTrainedTokenizerFast"}, {**LLAMA, "bos_token_id": 1}, None),
    (False, {"tokenizer_class": "LlamaTokenizerFast"}, {**QWEN, "bos_token_id": 1}, 1),
    (True, {}, {**QWEN, "bos_token_id": None}, 1),
]


@pytest.mark.parametrize(("adds", "told", "config", "bos"), BEGINS)
def test_a_text_begins_as_the_family_or_the_tokenizer_says(
    adds: bool, told: Any, config: Any, bos: int | None, tmp_path: Path
) -> None:
    """Once, whoever puts it there."""
    config = {**config, "eos_token_id": 2}
    found = folder_tokenizer(written(tmp_path, adds=adds, told=told, config=config))
    assert found is not None and found.bos == bos
    assert found.vocabulary.encode("a a") == [0, 0]


def test_a_tokenizer_is_not_kept_through_a_link(tmp_path: Path) -> None:
    """Not even through one to another file of the run."""
    config = json.dumps({"experiment": {"class": "jaxtrain.experiment.fields:Experiment"}})
    (tmp_path / "config.json").write_text(config)
    (tmp_path / "tokenizer_config.json").symlink_to("config.json")
    dataset = SimpleNamespace(vocabulary=ByteTokenizer())
    with pytest.raises(ValueError, match="is a symbolic link to config"):
        record_beginning(tmp_path, dataset, is_new=True)
    assert (tmp_path / "config.json").read_text() == config


# Handed on.

SAID = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "pad_token": "<pad>",
    "chat_template": "{{ messages }}",
    "add_bos_token": True,
    "add_eos_token": True,
    "tokenizer_class": "LlamaTokenizer",
    "auto_map": {"AutoTokenizer": "theirs.py"},
}


def test_what_a_folder_says_of_the_same_tokenizer_is_handed_on(tmp_path: Path) -> None:
    """But a text begins as in training, with nothing; and again by who reads what was handed on."""
    source = written(
        tmp_path / "source",
        adds=True,
        told=SAID,
        config={**LLAMA, "bos_token_id": 1, "eos_token_id": [2, 4]},
    )
    vocabulary = HuggingFaceVocabulary(tokenizer(adds=True), eos="</s>")
    files = tokenizer_files(vocabulary, source)
    settings = json.loads(files["tokenizer_config.json"])
    for name in ("bos_token", "pad_token", "chat_template"):
        assert settings[name] == SAID[name]
    assert settings["eos_token"] == "</s>" and settings["add_bos_token"] is False
    assert settings["add_eos_token"] is False
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "auto_map" not in settings
    numbers = {"bos_token_id": 1, "eos_token_id": [2, 4], "pad_token_id": 5}
    assert json.loads(files["generation_config.json"]) == numbers
    assert json.loads(files["tokenizer.json"]) == json.loads(tokenizer(adds=False))

    out = tmp_path / "out"
    out.mkdir()
    for name, text in {**files, "config.json": json.dumps({**LLAMA, **numbers})}.items():
        (out / name).write_text(text)
    kept = folder_tokenizer(out)
    assert kept is not None and (kept.bos, kept.ends) == (None, {2, 4})
    assert tokenizer_files(kept.vocabulary, out) == files


def test_what_is_said_of_another_tokenizer_is_not_handed_on(tmp_path: Path) -> None:
    source = written(tmp_path, adds=True, told=SAID, config={"eos_token_id": [2, 4]})
    other = Tokenizer(models.WordLevel({**IDS, "b": 6}, unk_token="?"))
    other.add_special_tokens(["</s>"])
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    for folder in (source, tmp_path / "nowhere", None):
        vocabulary = HuggingFaceVocabulary(other.to_str(), eos="</s>")
        files = tokenizer_files(vocabulary, folder)
        assert json.loads(files["tokenizer_config.json"]) == told
        assert json.loads(files["generation_config.json"])["eos_token_id"] == 2
    numbers = json.loads(tokenizer_files(ByteTokenizer(), source)["generation_config.json"])
    assert numbers == {"bos_token_id": None, "eos_token_id": 256, "pad_token_id": None}


def test_templates_and_tokens_of_files_beside_are_found(tmp_path: Path) -> None:
    """As `transformers` 5 and 4 have them."""
    source = written(tmp_path, adds=False, told={"eos_token": "</s>"}, config={})
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>"}))
    files = tokenizer_files(HuggingFaceVocabulary(tokenizer(adds=False), eos="</s>"), source)
    settings = json.loads(files["tokenizer_config.json"])
    assert (settings["chat_template"], settings["bos_token"]) == ("{{ messages }}", "<s>")
    assert json.loads(files["generation_config.json"])["bos_token_id"] == 1


@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_what_is_handed_on(tmp_path: Path) -> None:
    why = "compares with transformers; pip install '.[parity]'"
    transformers: Any = pytest.importorskip("transformers", reason=why)
    source = written(tmp_path, adds=True, told=SAID, config={"eos_token_id": [2, 4]})
    files = tokenizer_files(HuggingFaceVocabulary(tokenizer(adds=True), eos="</s>"), source)
    out = tmp_path / "out"
    out.mkdir()
    config = json.dumps({**LLAMA, "model_type": "llama"})
    for name, text in {**files, "config.json": config}.items():
        (out / name).write_text(text)
    found = transformers.AutoTokenizer.from_pretrained(out)
    assert found("a a").input_ids == [0, 0]
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 5)
    assert found.chat_template == "{{ messages }}"
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert (generation.bos_token_id, generation.eos_token_id) == (1, [2, 4])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("own", [True, False], ids=["post-processor", "settings"])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_texts_begin_in_training_in_the_run_and_in_transformers_alike(
    tmp_path: Path, own: bool, add_bos: bool | None
) -> None:
    """As the tokenizer's own post-processor, or the field, says."""
    told = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    source = written(tmp_path / "s", adds=own, told=told, config={**LLAMA, "bos_token_id": 1})
    value = TokenizerFile(str(source / "tokenizer.json"), add_bos=add_bos)
    vocabulary = value.build(lambda: iter(()), corpus="", cache_dir=tmp_path)
    assert vocabulary.eos_token == "</s>"
    begins = [1] if add_bos or (add_bos is None and own) else []
    (tmp_path / "text.txt").write_text("a a")
    files = jaxtrain.TextFiles(str(tmp_path / "text.txt"), held_out=0.0)
    data = jaxtrain.TextData(files, value, seq=3 + len(begins))
    dataset = data.open("train", seed=0, cache_dir=tmp_path)
    row = {name: part[0].tolist() for name, part in dataset.rows(np.arange(1)).items()}
    assert row["tokens"] == [*begins, 0, 0, 2] and dataset.encode("a a") == [*begins, 0, 0]
    assert row["weights"] == [*([1] if begins else []), 1, 1, 0]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    for name, text in tokenizer_files(vocabulary, source).items():
        (tmp_path / "run" / name).write_text(text)
    kept = folder_tokenizer(tmp_path / "run")
    assert kept is not None and kept.bos == (begins[0] if begins else None)
    assert kept.vocabulary.encode("a a") == [0, 0]
    (tmp_path / "run" / "config.json").write_text(json.dumps({**LLAMA, "model_type": "llama"}))
    why = "compares with transformers; pip install '.[parity]'"
    transformers: Any = pytest.importorskip("transformers", reason=why)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "run")
    assert theirs("a a").input_ids == [*begins, 0, 0]


def test_a_document_may_end_without_eos(tmp_path: Path) -> None:
    source = written(tmp_path / "s", adds=False, told={"eos_token": "</s>"}, config={})
    value = TokenizerFile(str(source / "tokenizer.json"), add_eos=False)
    (tmp_path / "text.txt").write_text("a a a")
    files = jaxtrain.TextFiles(str(tmp_path / "text.txt"), held_out=0.0)
    dataset = jaxtrain.TextData(files, value, seq=3).open("train", seed=0, cache_dir=tmp_path)
    assert dataset.rows(np.arange(1))["tokens"].tolist() == [[0, 0, 0]]
    with pytest.raises(ValueError, match=r"add_bos=True, and .* names no"):
        value = TokenizerFile(str(source / "tokenizer.json"), add_bos=True)
        value.build(lambda: iter(()), corpus="", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "template", ["{% if messages[0].role == 'system' %}x{% endif %}", "{% if %}"]
)
def test_a_template_that_no_conversation_needs_stops_nothing(tmp_path: Path, template: str) -> None:
    source = written(tmp_path / "s", adds=False, told={"eos_token": "</s>"}, config={})
    (source / "chat_template.jinja").write_text(template)
    value = TokenizerFile(str(source)).build(lambda: iter(()), corpus="", cache_dir=tmp_path)
    files = tokenizer_files(value, None)
    assert json.loads(files["tokenizer_config.json"])["chat_template"] == template
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 2
