"""Parity with `transformers` is measured on programs as `train` compiles them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def cheap_compiler() -> None:
    """Not the cheap one of the tests above: optimised, as it is."""
