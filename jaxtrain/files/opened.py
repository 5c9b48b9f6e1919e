"""A folder of a model, on the disk or in a store, as it was when it was opened."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from jaxtrain.files.fetched import (
    StoredFile,
    cached_place,
    digest_of,
    fetched,
    fetched_folder,
    stored_files,
)
from jaxtrain.files.folder import file_of
from jaxtrain.files.pointer import given_address, given_path, unreadable
from jaxtrain.files.store import AnyPath
from jaxtrain.files.stores import is_address

TEXTS = (
    *("config.json", "generation_config.json", "adapter_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    "model.safetensors.index.json",
)
"""Files of a folder that are fetched when it is opened; others when they are read."""
TENSORS = ".safetensors"


@dataclass(frozen=True)
class OpenedFolder:
    """place: the folder, or its address. here: a directory that has its texts, the folder itself if
    it is on the disk. stored: the files of one in a store, by name; None else."""

    place: AnyPath
    here: Path
    stored: Mapping[str, StoredFile] | None = None

    def names(self) -> set[str]:
        """Returns the names of the folder's files."""
        if self.stored is not None:
            return {*self.stored}
        return {path.name for path in self.here.glob("*") if path.is_file()}

    def remote(self, name: str) -> StoredFile | None:
        """Returns a file that is in the store alone; None for one that is here. Raises ValueError
        for one that is in neither."""
        file = self._stored(name)
        return None if file is None or cached_place(file).is_file() else file

    def whole(self, name: str) -> Path:
        """Returns the path of a file, which is fetched first if it is in the store alone. Raises
        ValueError as `remote` and `file_of`; StoreFailed."""
        if (file := self._stored(name)) is None:
            return file_of(self.here, name)
        try:
            return fetched(file)
        except OSError as error:
            raise unreadable(file.address, error) from error

    def _stored(self, name: str) -> StoredFile | None:
        if self.stored is None or name in self.stored:
            return None if self.stored is None else self.stored[name]
        raise ValueError(f"{os.fspath(self.place)} has no file {name!r}")

    @property
    def version(self) -> str:
        """A text that is equal for two that have the same files; "" on a disk."""
        return digest_of(*_versions((self.stored or {}).values())) if self.stored else ""


FolderOrPath = str | Path | OpenedFolder


def open_folder(name: str, path: FolderOrPath, more: tuple[str, ...] = ()) -> OpenedFolder:
    """Returns the folder of the argument `name`. path: or a folder that is open, as it was then.
    more: names of texts beside TEXTS. Raises ValueError for an address that is not read, and where
    nothing is; StoreFailed."""
    if isinstance(path, OpenedFolder):
        return path
    if not is_address(path):
        folder = given_path(name, path)
        return OpenedFolder(folder, folder)
    address = given_address(name, path)
    try:
        stored, folders = stored_files(address)
        texts = {text: stored[text] for text in (*TEXTS, *more) if text in stored}
        if not texts and not any(file.endswith(TENSORS) for file in stored):
            known = ", ".join(dict.fromkeys(("config.json", "tokenizer.json", *more)))
            inner = f", such as {address / min(folders)}" if folders else ""
            raise ValueError(
                f"{os.fspath(address)} has no {known} or another file of a model; give the address "
                f"of a model's folder, or of a run{inner}"
            )
        key = digest_of(os.fspath(address), *_versions(texts.values()))
        return OpenedFolder(address, fetched_folder(f"store-{key}", address, texts, {}), stored)
    except OSError as error:
        raise unreadable(address, error) from error


def _versions(files: Iterable[StoredFile]) -> list[str]:
    return sorted(f"{os.fspath(file.address)} {file.size} {file.version}" for file in files)
