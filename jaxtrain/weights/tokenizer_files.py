"""The tokenizer stored with a model's weights: kept by a run, read from a folder, passed on.

A run directory has it in the same files as a folder of `transformers`, so that one function reads
both.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.run_config import NAME
from jaxtrain.data import ByteTokenizer
from jaxtrain.experiment import FromHuggingFace, FromRun
from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import stored_field
from jaxtrain.files.opened import open_folder
from jaxtrain.files.regular import write_text
from jaxtrain.files.store import AnyPath
from jaxtrain.files.stored_run import opened_run
from jaxtrain.notices import notice
from jaxtrain.tokenizers import EOS, LARGEST_ID, HuggingFaceVocabulary, Vocabulary, open_tokenizer
from jaxtrain.tokenizers.chat import ChatEncoder, folder_template
from jaxtrain.tokenizers.settings import (
    SETTINGS,
    TOKENIZER,
    json_object,
    text_of,
    token_text,
    tokenizer_settings,
)

GENERATION = "generation_config.json"
ROWS = "max_position_embeddings"
POSITIONS = "positions.json"
"""A run's: max_position_embeddings of the folder it began with."""

BEGINS_TEXT = ("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM")
"""Architectures whose own tokenizer, a `LlamaTokenizer`, begins a text with bos by default."""

ELSEWHERE = ("auto_map", "name_or_path", "special_tokens_map_file", "tokenizer_file")
"""Settings that name files or code which are not copied."""


@dataclass(frozen=True)
class KeptTokenizer:
    """bos: the id that a text begins with, if any. ends: the ids that end a text; eos is one."""

    vocabulary: Vocabulary
    bos: int | None
    ends: frozenset[int]


def vocabulary_of(dataset: Any) -> Any:
    """Returns the tokenizer of a dataset, which those of a mixture share; None if it has none."""
    parts = getattr(dataset, "datasets", None) or [dataset]
    return getattr(parts[0], "vocabulary", None)


def record_beginning(run: Path, dataset: Any, *, is_new: bool) -> None:
    """Stores in a run's directory what it needs of its data and of the folder or run that it began
    with, since they may no longer exist when the run is used: the tokenizer, with the settings that
    the folder has for the same one, and the largest number of positions that it declares. A resumed
    run keeps its files. is_new: raise StoreFailed where the folder's store does not answer."""
    vocabulary = vocabulary_of(dataset)
    content = tokenizer_text(vocabulary)
    has_tokenizer = (run / SETTINGS).is_file() and text_of(run / TOKENIZER) == content
    is_lacking = content is not None and not has_tokenizer
    if (run / POSITIONS).is_file() and not is_lacking:
        return
    start = _beginning_of(run, is_new=is_new)
    if start is not None and not (run / POSITIONS).is_file():
        with suppress(OSError, ValueError):  # no longer readable
            if positions := declared_positions(start):
                write_text(run / POSITIONS, json.dumps({ROWS: positions}) + "\n")
    if is_lacking:
        for name, text in tokenizer_files(vocabulary, start).items():
            write_text(run / name, text)


def declared_positions(path: Path) -> int | None:
    """Returns the largest number of positions that a folder declares, or that a run records of the
    folder it began with; None if there is none. Raises OSError, and ValueError as `json_object`."""
    limits = [json_object(path / name).get(ROWS) for name in (NAME, POSITIONS)]
    return max((n for n in limits if type(n) is int and n > 0), default=None)


def _beginning_of(run: Path, *, is_new: bool) -> Path | None:
    """Returns the folder or the run that `run` began with, None if neither. Only for runs of one's
    own, since the path is opened. Raises ValueError for an address that is not read, if `is_new`;
    else None is returned for it."""
    start = getattr(stored_field(run, "fine_tuning"), "start", None)
    try:
        match start:
            case FromHuggingFace(folder):
                return open_folder("folder", folder).here
            case FromRun(run_dir):
                return opened_run("run_dir", run_dir)
    except ValueError as error:
        if is_new:
            raise
        notice(f"NOTE {error}: what it says of the tokenizer is kept as far as the run has it")
    return None


def tokenizer_text(vocabulary: Any) -> str | None:
    """Returns the tokenizer.json of `tokenizer_files`; None where it has none."""
    if isinstance(vocabulary, ByteTokenizer):
        vocabulary = vocabulary.published()
    if not isinstance(vocabulary, HuggingFaceVocabulary):
        return None
    return vocabulary.bare().beginning_with(vocabulary.bos)


def tokenizer_files(vocabulary: Any, source: Path | None) -> dict[str, str]:
    """Returns files, by name, from which `transformers` loads this tokenizer; {} where it has no
    tokenizer.json.

    source: a folder or a run. Its settings (bos, padding, the template of a chat) and its end
    tokens are used if its tokenizer is the same one. A text begins as in the training data,
    whatever the tokenizer or the settings say.
    """
    if isinstance(vocabulary, ByteTokenizer):
        vocabulary = vocabulary.published()
    if not isinstance(vocabulary, HuggingFaceVocabulary):
        return {}
    bare = vocabulary.bare()
    declared = _settings_of_same(source, bare)
    settings = {k: v for k, v in declared.settings.items() if k not in ELSEWHERE}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": bare.eos_token}
    more_ends = sorted({*declared.ids("eos"), *_end_of_turn(bare)} - {bare.eos})
    numbers: dict[str, Any] = {"eos_token_id": [bare.eos, *more_ends] if more_ends else bare.eos}
    for name in ("bos", "pad"):
        number = bare.id_of(declared.token(name))
        numbers[f"{name}_token_id"] = (
            next(iter(declared.ids(name)), None) if number is None else number
        )
    if vocabulary.bos is not None:
        numbers["bos_token_id"] = vocabulary.bos
        settings["bos_token"] = bare.token(vocabulary.bos)
    if numbers["bos_token_id"] is not None:
        settings["add_bos_token"] = vocabulary.bos is not None
    if "add_eos_token" in settings:
        settings["add_eos_token"] = False
    if bare.chat is not None:
        settings = {**dict(bare.chat.tokens), **settings, "chat_template": bare.chat.stored}
    texts = {GENERATION: numbers, SETTINGS: settings}  # the last says that all are there
    shown = {k: json.dumps(v, indent=2, ensure_ascii=False) + "\n" for k, v in texts.items()}
    return {TOKENIZER: tokenizer_text(vocabulary) or "", **shown}


def _end_of_turn(vocabulary: HuggingFaceVocabulary) -> set[int]:
    """Returns the id that ends a turn in its chat template; none without a template that works."""
    try:
        with ChatEncoder(vocabulary) as chat:
            return {end for end in (chat.end_of_turn(),) if end is not None}
    except ValueError:
        return set()


def folder_tokenizer(folder: Path, place: AnyPath | None = None) -> KeptTokenizer | None:
    """Returns the tokenizer of a folder, or of a run that keeps it in the same files; None where
    there is none. place: of the folder, for messages. Raises ValueError where no file says which
    token ends a text."""
    content = text_of(folder / TOKENIZER)
    if content is None:
        return None
    try:
        return _tokenizer_of(folder, content)
    except ValueError as error:
        named = (place or folder) / TOKENIZER
        raise ValueError(f"{named} cannot be used as a tokenizer: {error}") from error


def _tokenizer_of(folder: Path, content: str) -> KeptTokenizer:
    declared = _token_settings(folder)
    eos, numbers = declared.token("eos"), declared.ids("eos")
    if eos is None and numbers:
        eos = _token_of(content, numbers[0])
    if eos is None:
        raise ValueError(
            f"neither eos_token in {SETTINGS} nor eos_token_id in {NAME} or {GENERATION} "
            f"names a token of {TOKENIZER}; add one of them"
        )
    vocabulary = HuggingFaceVocabulary(content, eos=eos, chat=folder_template(folder))
    return KeptTokenizer(
        vocabulary, _bos(folder, vocabulary), frozenset({vocabulary.eos, *numbers})
    )


def run_tokenizer(run: Path, trust: Trust = ()) -> KeptTokenizer | None:
    """Returns the tokenizer that a run keeps. If the run keeps only a tokenizer.json, the eos comes
    from its config; a tokenizer without a file, such as `ByteTokenizer`, comes from there entirely.
    None if the data has no text. trust: as for `stored_field`. Raises ValueError if the tokenizer
    is in a file elsewhere: no path in the config is opened, since the run may be a stranger's."""
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
        vocabulary = HuggingFaceVocabulary(content, eos=tokenizer.eos or EOS)
    else:
        raise ValueError(
            f"{run} keeps no {TOKENIZER}, and no file that its {NAME} names is opened, for a run "
            f"may be a stranger's; put the {TOKENIZER} of its {type(tokenizer).__name__} there, or "
            "start the training again where its data is: a run keeps its tokenizer when it starts, "
            "also one whose steps are all done"
        )
    return KeptTokenizer(vocabulary, None, frozenset({vocabulary.eos}))


@dataclass(frozen=True)
class _TokenSettings:
    """Token settings in a folder's files.

    settings: of the tokenizer. numbers: ids of bos, eos and pad in config.json and
    generation_config.json.
    """

    settings: dict[str, Any]
    numbers: dict[str, list[int]]

    def token(self, name: str) -> str | None:
        """The text of bos, eos or pad."""
        return token_text(self.settings.get(f"{name}_token"))

    def ids(self, name: str) -> list[int]:
        return self.numbers.get(name, [])


def _token_settings(folder: Path) -> _TokenSettings:
    settings = tokenizer_settings(folder)
    numbers: dict[str, list[int]] = {}
    for raw in (json_object(folder / NAME), json_object(folder / GENERATION)):
        for name in ("bos", "eos", "pad"):
            value = raw.get(f"{name}_token_id")
            listed = value if isinstance(value, list) else [value]
            ids = numbers.setdefault(name, [])
            ids += [i for i in listed if type(i) is int and 0 <= i < LARGEST_ID and i not in ids]
    return _TokenSettings(settings, numbers)


def _settings_of_same(folder: Path | None, bare: HuggingFaceVocabulary) -> _TokenSettings:
    """Returns a folder's token settings if its tokenizer is the same, apart from the tokens it puts
    around a text; else empty settings."""
    try:
        content = None if folder is None else text_of(folder / TOKENIZER)
        if folder is not None and content is not None:
            theirs = HuggingFaceVocabulary(content, eos=bare.eos_token).bare()
            if theirs.key == bare.key:
                return _token_settings(folder)
    except (OSError, ValueError):  # no longer readable, or without this eos
        pass
    return _TokenSettings({}, {})


def _token_of(content: str, number: int) -> str | None:
    return open_tokenizer(content).id_to_token(number)


def _bos(folder: Path, vocabulary: HuggingFaceVocabulary) -> int | None:
    """Returns the id that begins a text in `transformers`: the first token that the tokenizer's own
    post-processor adds, or bos if add_bos_token or the tokenizer's class says so. Raises ValueError
    for files that cannot be read."""
    if (first := vocabulary.begins_with()) is not None:
        return first
    settings, config = tokenizer_settings(folder), json_object(folder / NAME)
    kind, built = settings.get("tokenizer_class"), config.get("architectures")
    adds_bos = isinstance(built, list) and any(name in BEGINS_TEXT for name in built)
    default = adds_bos if kind is None else "Llama" in str(kind)
    first = config.get("bos_token_id")
    valid = type(first) is int and 0 <= first < LARGEST_ID
    return first if valid and settings.get("add_bos_token", default) else None
