"""The tokenizer beside a model's weights: kept by a run, read from a folder, handed on.

A run directory has it in the files that a folder of `transformers` has it in, so that both are read
by one rule and what a run says its folder says.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.run_config import NAME
from jaxtrain.data import ByteTokenizer
from jaxtrain.data.tokenizer import LARGEST_ID, HuggingFaceVocabulary, Vocabulary, open_tokenizer
from jaxtrain.experiment import FromHuggingFace, FromRun
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.files.folder import file_of
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import read_text, write_text

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
GENERATION, SPECIAL = "generation_config.json", "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
ROWS = "max_position_embeddings"
POSITIONS = "positions.json"
"""A run's: max_position_embeddings of the folder it began with."""

BEGINS_TEXT = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
"""Architectures whose own tokenizer, a `LlamaTokenizer`, begins a text with bos unless told."""

ELSEWHERE = ("auto_map", "name_or_path", "special_tokens_map_file", "tokenizer_file")
"""Settings that name what does not come along."""


@dataclass(frozen=True)
class KeptTokenizer:
    """bos: the id that a text begins with, if any. ends: the ids that end a text; eos is one."""

    vocabulary: Vocabulary
    bos: int | None
    ends: frozenset[int]


def record_tokenizer(run: Path, dataset: Any) -> None:
    """Keep the tokenizer of a run's data in its directory, for what it came from may be gone when
    the run is used; with what the folder or run it began with says of the same tokenizer. A resumed
    run keeps what it has."""
    first = getattr(dataset, "datasets", [dataset])[0]  # those of a mixture share it
    files = tokenizer_files(getattr(first, "vocabulary", None), _beginning_of(run))
    kept = (run / SETTINGS).is_file() and text_of(run / TOKENIZER) == files.get(TOKENIZER)
    if not kept:
        for name, text in files.items():
            write_text(run / name, text)


def record_positions(run: Path) -> None:
    """Keep in a run's directory the most positions that the folder or run it began with knows of. A
    resumed run keeps what it has."""
    start = _beginning_of(run)
    if start is not None and not (run / POSITIONS).is_file():
        with suppress(OSError, ValueError):  # no longer readable
            known = [json_object(start / name).get(ROWS) for name in (NAME, POSITIONS)]
            if found := [n for n in known if type(n) is int and n > 0]:
                write_text(run / POSITIONS, json.dumps({ROWS: max(found)}) + "\n")


def kept_positions(run: Path) -> int | None:
    """What `record_positions` kept, None for nothing. Raises ValueError as `json_object`."""
    found = json_object(run / POSITIONS).get(ROWS)
    return found if type(found) is int and found > 0 else None


def _beginning_of(run: Path) -> Path | None:
    """The folder or the run that a run of one's own began with; a stranger's is not looked up."""
    match getattr(stored_field(run, "fine_tuning"), "start", None):
        case FromHuggingFace(folder):
            return Path(folder)
        case FromRun(run_dir):
            return Path(run_dir)
    return None


def tokenizer_files(vocabulary: Any, source: Path | None) -> dict[str, str]:
    """Files, by their names, that say a tokenizer as `transformers` reads it; {} where it is no
    tokenizer.json.

    source: a folder or a run, of which the settings (bos, padding, the template of a chat) and the
    ends are taken over where its tokenizer is this one. Nothing is put before a text, whatever the
    tokenizer or the settings say: data is encoded so, and a model goes on as it was trained.
    """
    if isinstance(vocabulary, ByteTokenizer):
        vocabulary = vocabulary.published()
    if not isinstance(vocabulary, HuggingFaceVocabulary):
        return {}
    bare = vocabulary.bare()
    said = _said_of_same(source, bare)
    settings = {k: v for k, v in said.settings.items() if k not in ELSEWHERE}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": bare.eos_token}
    others = sorted({*said.ids("eos")} - {bare.eos})
    numbers: dict[str, Any] = {"eos_token_id": [bare.eos, *others] if others else bare.eos}
    for name in ("bos", "pad"):
        named = bare.id_of(said.token(name))
        numbers[f"{name}_token_id"] = next(iter(said.ids(name)), None) if named is None else named
    if numbers["bos_token_id"] is not None:
        settings["add_bos_token"] = False
    if "add_eos_token" in settings:
        settings["add_eos_token"] = False
    texts = {GENERATION: numbers, SETTINGS: settings}  # the last says that all are there
    shown = {k: json.dumps(v, indent=2, ensure_ascii=False) + "\n" for k, v in texts.items()}
    return {TOKENIZER: bare.json, **shown}


def folder_tokenizer(folder: Path) -> KeptTokenizer | None:
    """What a folder has, or a run that keeps it in the same files; None where there is none. Raises
    ValueError where nothing says which token ends a text."""
    content = text_of(folder / TOKENIZER)
    if content is None:
        return None
    try:
        return _tokenizer_of(folder, content)
    except ValueError as error:
        raise ValueError(f"{folder / TOKENIZER} cannot be used as a tokenizer: {error}") from error


def _tokenizer_of(folder: Path, content: str) -> KeptTokenizer:
    said = _said(folder)
    eos, numbers = said.token("eos"), said.ids("eos")
    if eos is None and numbers:
        eos = _token_of(content, numbers[0])
    if eos is None:
        raise ValueError(
            f"neither eos_token in {SETTINGS} nor eos_token_id in {NAME} or {GENERATION} "
            f"names a token of {TOKENIZER}; add one of them"
        )
    vocabulary = HuggingFaceVocabulary(content, eos=eos)
    return KeptTokenizer(
        vocabulary, _bos(folder, vocabulary, said), frozenset({vocabulary.eos, *numbers})
    )


def run_tokenizer(run: Path, trust: Trust = ()) -> KeptTokenizer | None:
    """The tokenizer that a run keeps; where it keeps no eos, that of its data. None where the data
    has no text. trust: as for `stored_field`. A run may be a stranger's: no path that its config
    spells is opened. Raises ValueError where the tokenizer lies elsewhere."""
    content = text_of(run / TOKENIZER)
    if content is not None and (run / SETTINGS).is_file():
        return folder_tokenizer(run)
    data = stored_field(run, "data", trust=trust)
    tokenizer = getattr(data, "tokenizer", None)
    if tokenizer is None:
        return None
    if hasattr(tokenizer, "encode"):  # its own vocabulary, as a ByteTokenizer is
        vocabulary = tokenizer
    elif content is not None:
        vocabulary = HuggingFaceVocabulary(content, eos=tokenizer.eos)
    else:
        raise ValueError(
            f"{run} keeps no {TOKENIZER}, and no file that its {NAME} names is opened, for a run "
            f"may be a stranger's; put the {TOKENIZER} of its {type(tokenizer).__name__} there, or "
            "start the training again where its data is: a run keeps its tokenizer when it starts, "
            "also one whose steps are all done"
        )
    return KeptTokenizer(vocabulary, None, frozenset({vocabulary.eos}))


@dataclass(frozen=True)
class _Said:
    """What a folder's files say of its tokens: settings of the tokenizer, and numbers of them from
    config.json and generation_config.json."""

    settings: dict[str, Any]
    numbers: dict[str, list[int]]

    def token(self, name: str) -> str | None:
        """The text of bos, eos or pad."""
        said = self.settings.get(f"{name}_token")
        said = said.get("content") if isinstance(said, dict) else said
        return said if isinstance(said, str) else None

    def ids(self, name: str) -> list[int]:
        return self.numbers.get(name, [])


def _said(folder: Path) -> _Said:
    settings = {**json_object(folder / SPECIAL), **json_object(folder / SETTINGS)}
    if (template := text_of(folder / TEMPLATE)) is not None:
        settings.setdefault("chat_template", template)
    numbers: dict[str, list[int]] = {}
    for raw in (json_object(folder / NAME), json_object(folder / GENERATION)):
        for name in ("bos", "eos", "pad"):
            given = raw.get(f"{name}_token_id")
            found = given if isinstance(given, list) else [given]
            mine = numbers.setdefault(name, [])
            mine += [i for i in found if type(i) is int and 0 <= i < LARGEST_ID and i not in mine]
    return _Said(settings, numbers)


def _said_of_same(folder: Path | None, bare: HuggingFaceVocabulary) -> _Said:
    """What a folder says of its tokenizer, if that is this one but for what it puts around a text;
    else nothing."""
    try:
        content = None if folder is None else text_of(folder / TOKENIZER)
        if folder is not None and content is not None:
            theirs = HuggingFaceVocabulary(content, eos=bare.eos_token).bare()
            if theirs.key == bare.key:
                return _said(folder)
    except (OSError, ValueError):  # no longer readable, or without this eos
        pass
    return _Said({}, {})


def _token_of(content: str, number: int) -> str | None:
    return open_tokenizer(content).id_to_token(number)


def _bos(folder: Path, vocabulary: HuggingFaceVocabulary, said: _Said) -> int | None:
    """What a text begins with, as `transformers` has it: what the tokenizer's own post-processor
    puts there, or bos where add_bos_token or the tokenizer's class says so."""
    if (first := vocabulary.begins_with()) is not None:
        return first
    raw, kind = json_object(folder / NAME), said.settings.get("tokenizer_class")
    built = raw.get("architectures")
    own = isinstance(built, list) and any(name in BEGINS_TEXT for name in built)
    usual = own if kind is None else "Llama" in str(kind)
    first = raw.get("bos_token_id")
    known = type(first) is int and 0 <= first < LARGEST_ID
    return first if known and said.settings.get("add_bos_token", usual) else None


def text_of(path: Path) -> str | None:
    """A file's text, None where there is none. Raises ValueError as `file_of` and `read_text`."""
    try:
        return read_text(file_of(path.parent, path.name))
    except (FileNotFoundError, NotADirectoryError):
        return None


def json_object(path: Path) -> dict[str, Any]:
    """An object of a file; {} where there is no such file. Raises ValueError."""
    try:
        found = parse_json(text_of(path) or "{}")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
