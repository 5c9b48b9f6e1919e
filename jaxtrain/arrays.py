"""Arrays by name, which most of the packages pass on."""

from __future__ import annotations

from typing import Any

import jax

Arrays = dict[str, jax.Array]
"""Arrays by the names of their leaves or fields."""
Leaves = dict[str, Any]
"""The same, or what JAX puts in the place of arrays: shapes, shardings, cotangents of integers."""
