"""Resolves a file name within a folder from an untrusted source."""

from __future__ import annotations

from pathlib import Path


def plain_name(name: str) -> bool:
    """Returns True if a text is the name of a file in a folder, not a path."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name and "\0" not in name


def file_of(folder: Path, name: str) -> Path:
    """Returns the resolved path of the file with that name; the file need not exist.

    A link may lead to another file within the folder, and to a blob of a Hugging Face cache
    (`models--NAME/blobs/`), to which a downloaded folder's files link. Raises ValueError if it
    leads elsewhere, and for a name that is a path.
    """
    if not plain_name(name):
        raise ValueError(f"{name!r} is no name of a file in {folder}; only those are opened")
    try:
        real, home = (folder / name).resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise ValueError(f"{folder / name} leads nowhere: {error}") from error
    blob = real.parent.name == "blobs" and real.parent.parent.name.startswith("models--")
    if real.is_relative_to(home) or blob:
        return real
    raise ValueError(
        f"{folder / name} is a symbolic link out of its folder, to {real}, and is not followed; "
        "copy the file there, or give the folder that has it"
    )
