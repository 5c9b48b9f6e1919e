"""A tokenizer.json of one's own or of a published model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.files.opened import open_folder
from jaxtrain.files.pointer import StoreFailed
from jaxtrain.files.regular import read_text
from jaxtrain.files.stores import address_violations, is_address, store_violations
from jaxtrain.tokenizers.chat import folder_eos, folder_template
from jaxtrain.tokenizers.protocol import EOS
from jaxtrain.tokenizers.published import HuggingFaceVocabulary
from jaxtrain.tokenizers.settings import TOKENIZER, token_text, tokenizer_settings
from jaxtrain.violations import flag


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json of Hugging Face `tokenizers`.

    path: of the file, or of the folder that has it; or the address of either in a store. eos: the
    token that ends a document; None takes the one that tokenizer_config.json beside the file
    declares, else `<|endoftext|>`.
    chat_template: a file with the template by which conversations become text; None takes the one
    beside the tokenizer, chat_template.jinja or that in tokenizer_config.json, if there is one.
    add_bos: bos begins each document; None does as the tokenizer's own post-processor. add_eos: eos
    ends each document. Conversations begin and end as their template says.
    """

    path: str
    eos: str | None = None
    chat_template: str | None = None
    add_bos: bool | None = None
    add_eos: bool = True

    def __post_init__(self) -> None:
        problems = address_violations("path", self.path)
        problems += store_violations("chat_template", self.chat_template)
        for name in ("path", "eos", "chat_template"):
            value = getattr(self, name)
            absent = value is None and name != "path"
            if not absent and (not isinstance(value, str) or not value):
                problems.append(f"{name}={value!r} must be a text of one character or more")
        problems += flag("add_eos", self.add_eos)
        problems += [] if self.add_bos is None else flag("add_bos", self.add_bos)
        if problems:
            raise ValueError("TokenizerFile: " + "; ".join(problems))

    def absent(self) -> list[str]:
        """Returns a message for each file that does not exist. Files on the disk are not read.
        Raises StoreFailed."""
        problems, here = [], f" (from {Path.cwd()})"
        try:
            if not (path := self._file).is_file():
                place = self.path if is_address(self.path) else f"{path}{here}"
                problems.append(f"there is no tokenizer {place}")
        except StoreFailed:
            raise
        except ValueError as error:  # nothing is at the address
            problems.append(str(error))
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            problems.append(f"there is no chat template {self.chat_template}{here}")
        return problems

    def build(
        self, texts: Callable[[], Iterator[str]], *, corpus: str, cache_dir: Path
    ) -> HuggingFaceVocabulary:
        path, template = self._file, self.chat_template
        try:
            content = read_text(path)
            eos = self.eos or folder_eos(path.parent) or EOS
            chat = folder_template(path.parent, None if template is None else Path(template))
            plain = HuggingFaceVocabulary(content, eos=eos, chat=chat)
            bos = self._bos(plain, path.parent)
            if bos is None and self.add_eos:
                return plain
            return HuggingFaceVocabulary(content, eos=eos, chat=chat, bos=bos, add_eos=self.add_eos)
        except StoreFailed:
            raise
        except (OSError, ValueError) as error:
            place = self.path if is_address(self.path) else path
            raise ValueError(f"{place} cannot be used as a tokenizer: {error}") from error

    @property
    def _file(self) -> Path:
        if is_address(self.path):
            folder, _, file = self.path.rstrip("/").rpartition("/")
            if not file.endswith(".json"):
                folder, file = self.path, TOKENIZER
            return open_folder("path", folder, (file,)).here / file
        path = Path(self.path)
        return path / TOKENIZER if path.is_dir() else path

    def _bos(self, vocabulary: HuggingFaceVocabulary, folder: Path) -> int | None:
        if self.add_bos is None:
            return vocabulary.begins_with()
        if not self.add_bos:
            return None
        token = token_text(tokenizer_settings(folder).get("bos_token"))
        bos = vocabulary.begins_with() if token is None else vocabulary.id_of(token)
        if bos is None:
            raise ValueError(
                "add_bos=True, and tokenizer_config.json beside it names no bos_token of the "
                "vocabulary; name one there, or leave add_bos out"
            )
        return bos
