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
    start = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little")
    z = np.arange(1, n + 1, dtype=np.uint64)
    z *= np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(start)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def permutation(n: int, *key: int | str) -> np.ndarray:
    """[n] int64: a permutation of 0 .. n-1 that is a function of (n, key). Costs one sort."""
    return np.argsort(random_bits(n, *key), kind="stable")


def below(bits: np.ndarray, fraction: float) -> np.ndarray:
    """[n] bool: true for a `fraction` of all 64-bit numbers."""
    return bits / 2.0**64 < fraction
