"""A sealed file of named arrays: written atomically, memory-mapped, verified when opened.

Layout, little-endian:

    16 bytes   magic `JAXTRAIN-ARRAYS1`
     8 bytes   n, length of the header
     n bytes   header, JSON: kind, meta, and per array dtype, shape, offset, sha256
    32 bytes   sha256 of the header, which is the digest of the whole file
    zeros up to a multiple of 4096, then the arrays in C order, each aligned to 64 bytes

The header seals the arrays and its own digest seals the header, so two files with the same digest
hold the same content, wherever and whenever they were written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

MAGIC = b"JAXTRAIN-ARRAYS1"
PAGE_BYTES = 4096
ALIGN_BYTES = 64
VERIFY_BYTES = 256 << 20
"""Files up to this size are hashed in full when opened (0.2 s); longer ones by `verify=True`."""


class DamagedFile(ValueError):
    """The file is not what its header says: cut short, changed, or of another kind."""


class UnwritableFile(ValueError):
    """The file system refuses to write the file."""


class ArraySpec(NamedTuple):
    """An array to be written, given in consecutive chunks along its first dim."""

    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[np.ndarray]


class ArrayFile(NamedTuple):
    meta: dict[str, Any]
    arrays: dict[str, np.ndarray]
    digest: str


def whole(array: np.ndarray) -> ArraySpec:
    """The spec of an array that is in memory."""
    return ArraySpec(array.dtype.name, array.shape, (array,))


def write_arrays(
    path: Path, *, kind: str, meta: Mapping[str, Any], arrays: Mapping[str, ArraySpec]
) -> None:
    """Write the file, or leave nothing: a reader sees the old content or the new, never a part.

    Streams: no more than a chunk is held in memory. Raises ValueError when the chunks of an array
    do not add up to its shape, UnwritableFile when the file system refuses, FileNotFoundError when
    its folder is removed meanwhile.
    """
    # The name is unique because several processes of one run may build the same cache at once.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as file:
            _write_body(file, kind=kind, meta=dict(meta), arrays=arrays)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UnwritableFile(
            f"{path} cannot be written: {error.strerror}; make room, or use another directory"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def open_arrays(path: Path, *, kind: str, verify: bool | None = None) -> ArrayFile:
    """Memory-map the arrays of `path`.

    Header, length and kind are always checked; the arrays' digests when `verify`, which by default
    is so for files up to `VERIFY_BYTES`. Raises DamagedFile, or FileNotFoundError.
    """
    size = path.stat().st_size
    header, digest = _read_header(path, size)
    if header["kind"] != kind:
        raise DamagedFile(f"{path} is a {header['kind']} file, not a {kind} file")
    if size != header["bytes"]:
        raise DamagedFile(
            f"{path} is damaged: {size} bytes, its header says {header['bytes']}; write it again"
        )
    # A plain ndarray view: indexing through the memmap subclass costs several times more.
    raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    arrays = {}
    for name, spec in header["arrays"].items():
        dtype, shape = np.dtype(spec["dtype"]), tuple(spec["shape"])
        stop = spec["offset"] + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        body = raw[spec["offset"] : stop]
        check = size <= VERIFY_BYTES if verify is None else verify
        if check and hashlib.sha256(body.data).hexdigest() != spec["sha256"]:
            raise DamagedFile(f"{path} is damaged: the digest of {name!r} differs; write it again")
        arrays[name] = body.view(dtype).reshape(shape)
    return ArrayFile(meta=header["meta"], arrays=arrays, digest=digest)


def _read_header(path: Path, size: int) -> tuple[dict[str, Any], str]:
    with open(path, "rb") as file:
        start = file.read(24)
        length = int.from_bytes(start[16:], "little")
        if start[:16] != MAGIC or length > size:
            raise DamagedFile(f"{path} is not a jaxtrain array file, or its first bytes are gone")
        header = file.read(length)
        sealed = file.read(32)
    if hashlib.sha256(header).digest() != sealed:
        raise DamagedFile(f"{path} is damaged: its header does not match its digest")
    return json.loads(header), sealed.hex()


def _write_body(file: BinaryIO, *, kind: str, meta: dict, arrays: Mapping[str, ArraySpec]) -> None:
    table: dict[str, dict[str, Any]] = {
        name: {"dtype": spec.dtype, "shape": list(spec.shape), "offset": 0, "sha256": "0" * 64}
        for name, spec in arrays.items()
    }
    header = {"kind": kind, "meta": meta, "arrays": table, "bytes": 0}
    # Offsets and sizes are as yet unknown: 24 spare digits each are more than int64 needs.
    spare = 24 * (len(table) + 1)
    start = _align(len(_encode(header)) + spare + 56, PAGE_BYTES)
    end = start
    for name, spec in arrays.items():
        table[name]["offset"] = _align(end, ALIGN_BYTES)
        file.seek(table[name]["offset"])
        end = table[name]["offset"] + _write_array(file, name, spec, table[name])
    header["bytes"] = end
    file.truncate(end)
    encoded = _encode(header)
    file.seek(0)
    file.write(MAGIC + len(encoded).to_bytes(8, "little") + encoded)
    file.write(hashlib.sha256(encoded).digest())


def _write_array(file: BinaryIO, name: str, spec: ArraySpec, entry: dict[str, Any]) -> int:
    """Write the chunks and note their digest in `entry`; returns the bytes written."""
    hashed, written = hashlib.sha256(), 0
    for chunk in spec.chunks:
        data = np.ascontiguousarray(chunk, dtype=np.dtype(spec.dtype).newbyteorder("<"))
        hashed.update(data.data)
        file.write(data.data)
        written += data.nbytes
    expected = np.dtype(spec.dtype).itemsize * int(np.prod(spec.shape, dtype=np.int64))
    if written != expected:
        raise ValueError(
            f"array {name!r} of shape {spec.shape} has {expected} bytes, its chunks {written}"
        )
    entry["sha256"] = hashed.hexdigest()
    return written


def _encode(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True).encode("ascii")


def _align(offset: int, step: int) -> int:
    return -(-offset // step) * step
