"""Random numbers by name and index, so that any of them is found without those before it.

Written out, because numpy keeps the streams of its generators but not the algorithms over them:
`Generator.permutation` may differ between releases, and a resumed run must not.
"""

from __future__ import annotations

import hashlib

import numpy as np


def random_bits(n: int, *key: int | str) -> np.ndarray:
    """[n] uint64, element i a function of (key, i): SplitMix64 (Steele et al. 2014), random access.

    The key, a sequence of ints and strings, is hashed into the 64-bit starting state.
    """
    return _mix(np.arange(1, n + 1, dtype=np.uint64), _start(key))


def permutation(n: int, *key: int | str) -> np.ndarray:
    """[n] int64: a permutation of 0 .. n-1 that is a function of (n, key). Costs one sort."""
    return np.argsort(random_bits(n, *key), kind="stable")


def shuffle(indices: np.ndarray, n: int, *key: int | str) -> np.ndarray:
    """Returns the images of `indices` (int64) under a permutation of 0 .. n-1 set by (n, key).

    Nothing of size n is allocated: a Feistel network on the next even power of two is applied again
    while its result is out of range (Black and Rogaway 2002, Ciphers with arbitrary finite
    domains).
    """
    half = max(1, -(-(n - 1).bit_length() // 2))
    keys = [_start((*key, turn)) for turn in range(4)]
    shift, mask = np.uint64(half), np.uint64(2**half - 1)
    images = np.array(indices, dtype=np.uint64)
    outside = np.ones(images.shape, dtype=bool)
    while outside.any():
        left, right = images[outside] >> shift, images[outside] & mask
        for start in keys:
            left, right = right, left ^ (_mix(right, start) & mask)
        images[outside] = left << shift | right
        outside = images >= n
    return images.astype(np.int64)


def _start(key: tuple[int | str, ...]) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little"))


def _mix(counters: np.ndarray, start: np.uint64) -> np.ndarray:
    z = counters * np.uint64(0x9E3779B97F4A7C15) + start
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def below(bits: np.ndarray, fraction: float) -> np.ndarray:
    """[n] bool: true for a `fraction` of all 64-bit numbers."""
    return bits / 2.0**64 < fraction
