"""What the cache directory holds, and how it stays within its limit."""

from __future__ import annotations

import logging
import math
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from os import scandir
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.files.cache import ABOUT, LIMIT, USED, cache_directory, limit_gb
from jaxtrain.notices import size
from jaxtrain.reprs import aligned
from jaxtrain.violations import at_least, raise_violations

log = logging.getLogger(__name__)

UNUSED_DAYS = 30
"""For so long an entry must be unused, before a run removes it."""
DAY_S, HOUR_S = 86_400, 3_600
TOKENIZER = "tokenizer"
UNFINISHED = ", unfinished"
OF_STORES = ("file of a store", "texts of a store", "run in a store")
KINDS = {
    "tokens": r"[0-9a-f]{24}\.tokens",
    f"tokens{UNFINISHED}": r"[0-9a-f]{24}\.tokens\.parts",
    "packing index": r"packing-[0-9a-f]{16}-\d+-\d+\.index",
    "file of a store": r"[0-9a-f]{24}\.stored",
    "texts of a store": r"store-[0-9a-f]{24}",
    "run in a store": r"run-[0-9a-f]{24}",
    TOKENIZER: r"bpe-[0-9a-f]{24}\.tokenizer",
    f"file{UNFINISHED}": r"\.(?:packing-|bpe-|[0-9a-f]{24}\.)\S+\.[0-9a-f]{32}\.tmp"
    r"|\.(?:store-|run-)?[0-9a-f]{24}\S*-[0-9a-f]{8}",
}
"""What an entry is -> the pattern of its name. Nothing else in the directory is listed or removed.
"""


class CacheEntry(NamedTuple):
    """path: a file or a folder. bytes: what it takes. used: when it was last used, in seconds since
    1970. about: what it was made of, "" if unknown."""

    path: Path
    kind: str
    bytes: int
    used: float
    about: str


@dataclass(frozen=True)
class CacheContents:
    """entries: the longest unused first. limit_gb: of what they take, inf for none; runs remove
    what was unused for 30 days while it is more. removed: entries that were removed just now."""

    directory: Path
    limit_gb: float
    entries: tuple[CacheEntry, ...]
    removed: tuple[CacheEntry, ...] = ()

    @property
    def bytes(self) -> int:
        """What all entries take."""
        return _taken(self.entries)

    def __str__(self) -> str:
        rows = [["last used", "kind", "size", "of"], *map(_cells, self.entries)]
        lines = aligned(rows) if self.entries else []
        if self.removed:
            freed = size(_taken(self.removed))
            lines.append(f"removed: {_count(self.removed)}, {freed}")
        summary = "no entry of jaxtrain"
        if self.entries:
            summary = f"{_count(self.entries)}, {size(self.bytes)}"
        return "\n".join(
            [*lines, f"{self.directory}: {summary}; limit {self.limit_gb:g} GB ({LIMIT})"]
        )

    __repr__ = __str__

    def as_json(self) -> dict[str, Any]:
        """JSON for scripts; its keys are stable. A limit of inf is null."""
        lists = {"entries": self.entries, "removed": self.removed}
        return {
            "directory": str(self.directory),
            "limit_gb": self.limit_gb if self.limit_gb < math.inf else None,
            "bytes": self.bytes,
            **{k: [e._asdict() | {"path": str(e.path)} for e in v] for k, v in lists.items()},
        }


def _taken(entries: Iterable[CacheEntry]) -> int:
    """Bytes of all of them."""
    return sum(entry.bytes for entry in entries)


def _count(entries: tuple[CacheEntry, ...]) -> str:
    return f"{len(entries)} entr{'y' if len(entries) == 1 else 'ies'}"


def _cells(entry: CacheEntry) -> list[str]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
    return [used, entry.kind, size(entry.bytes), entry.about or entry.path.name]


def cache_contents(
    directory: str | Path | None = None, *, trim_gb: float | None = None
) -> CacheContents:
    """Returns what is in the cache. directory: as `cache_dir` of `jaxtrain.train`. trim_gb: removes
    the longest unused first until the others take no more GB than that, 0 for all but what a run is
    writing, or has used of a store within an hour. A run that reads from one goes on, if it is on a
    disk of this machine, and makes it again when it is resumed.

    Raises ValueError for a trim_gb that is no size and a directory that is none, and
    PermissionError where an entry cannot be removed, after the others.
    """
    if trim_gb is not None:
        raise_violations(at_least("trim_gb", trim_gb, 0))
    if directory is not None and not Path(directory).expanduser().is_dir():
        raise ValueError(
            f"there is no directory {directory}; give the one that is `cache_dir` of your runs"
        )
    path, removed = cache_directory(directory), []
    if trim_gb is not None:
        removed, stuck = _trim(path, trim_gb * 1e9)
        if stuck:
            raise PermissionError(f"{len(stuck)} entries cannot be removed; the first: {stuck[0]}")
    return CacheContents(path, limit_gb(), tuple(_entries(path)), tuple(removed))


def keep_within_limit(directory: Path) -> None:
    """Trims a cache in which something was just written to the limit of JAXTRAIN_CACHE_GB: what was
    not used for 30 days goes but for tokenizers, which are small, and a warning says so."""
    limit = limit_gb()
    removed, stuck = _trim(directory, limit * 1e9, unused_s=UNUSED_DAYS * DAY_S)
    if stuck:
        log.warning(
            "%s takes more than %s=%g, and %d entries cannot be removed; the first: %s",
            *(directory, LIMIT, limit, len(stuck), stuck[0]),
        )
    if removed:
        log.warning(
            "%s took more than %s=%g: removed %s that were not used for %d days (%d entries)",
            directory,
            LIMIT,
            limit,
            size(_taken(removed)),
            UNUSED_DAYS,
            len(removed),
        )


def _entries(directory: Path) -> list[CacheEntry]:
    """Returns the entries of a cache, the longest unused first."""
    entries = []
    with suppress(FileNotFoundError):
        for item in scandir(directory):
            kinds = (kind for kind, name in KINDS.items() if re.fullmatch(name, item.name))
            if (kind := next(kinds, None)) is not None:
                with suppress(FileNotFoundError):  # another process has just removed it
                    entries.append(_entry(Path(item.path), kind))
    return sorted(entries, key=lambda entry: (entry.used, entry.path))


def _entry(path: Path, kind: str) -> CacheEntry:
    statuses = [path.stat(), *(file.stat() for file in path.rglob("*"))]
    note, mark = (path.with_name(path.name + suffix) for suffix in (ABOUT, USED))
    if mark.exists():
        statuses.append(mark.stat())
    about = note.read_text(encoding="utf-8", errors="replace") if note.exists() else ""
    nbytes = sum(status.st_size for status in statuses if stat.S_ISREG(status.st_mode))
    return CacheEntry(path, kind, nbytes, max(status.st_mtime for status in statuses), about)


def _trim(
    directory: Path, limit_bytes: float, *, unused_s: float = 0.0
) -> tuple[list[CacheEntry], list[str]]:
    """Removes entries that were not used for so many seconds, the longest unused first, until all
    take no more than `limit_bytes`; if any time is asked for, no tokenizers. Returns those removed,
    and why others could not be."""
    entries, removed, stuck = _entries(directory), [], []
    excess = _taken(entries) - limit_bytes
    for entry in entries:
        age = time.time() - entry.used
        # A start reads what it has fetched soon after.
        is_begun = entry.kind.endswith(UNFINISHED) or entry.kind in OF_STORES
        stays = (is_begun and age < HOUR_S) or (unused_s > 0 and entry.kind == TOKENIZER)
        if excess > 0 and age >= unused_s and not stays:
            try:
                _remove(entry.path)
            except FileNotFoundError:  # another process was faster
                pass
            except OSError as error:
                stuck.append(str(error))
                continue
            excess -= entry.bytes
            removed.append(entry)
    return removed, stuck


def _remove(path: Path) -> None:
    if path.is_dir():  # whole until it is gone, whatever happens meanwhile
        unfinished = path.with_name(f".{path.name.lstrip('.')}-{uuid.uuid4().hex[:8]}")
        path.rename(unfinished)
        shutil.rmtree(unfinished)
    else:
        path.unlink()
    for suffix in (ABOUT, USED):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
