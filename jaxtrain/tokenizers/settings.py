"""Files beside a tokenizer.json, as `transformers` writes them: special tokens and templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtrain.files.folder import file_of
from jaxtrain.files.json_text import parse_json
from jaxtrain.files.regular import read_text

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, TEMPLATE = "special_tokens_map.json", "chat_template.jinja"


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Returns the settings of a folder's tokenizer; {} where it has none. `chat_template` is that
    in chat_template.jinja, if there is one. Raises ValueError for files that cannot be read."""
    settings = {**json_object(folder / SPECIAL_TOKENS), **json_object(folder / SETTINGS)}
    template = text_of(folder / TEMPLATE)
    return settings if template is None else settings | {"chat_template": template}


def token_text(value: object) -> str | None:
    """Returns a token in a tokenizer's settings, which is a text or an object with one."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def text_of(path: Path) -> str | None:
    """Returns a file's text, None where there is no file. Raises ValueError as `file_of` and
    `read_text`."""
    try:
        return read_text(file_of(path.parent, path.name))
    except (FileNotFoundError, NotADirectoryError):
        return None


def json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file; {} if there is no file, or its JSON is not an object.
    Raises ValueError if the file cannot be read."""
    try:
        parsed = parse_json(text_of(path) or "{}")
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    return parsed if isinstance(parsed, dict) else {}
