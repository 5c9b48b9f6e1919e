"""Shapes and types, checked while tests run: annotations of `PACKAGES` become assertions.

jaxtyping's import hook puts a check around every function of these packages as they are imported;
outside the tests annotations are only read. Measure without it, or look for what it changes, by
`JAXTRAIN_UNCHECKED=1`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import unwrap
from typing import TypeVar

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook
from jaxtyping._import_hook import JaxtypingTransformer

PACKAGES = (
    "jaxtrain.collectives",
    "jaxtrain.attention",
    "jaxtrain.moe",
    "jaxtrain.nn",
    "jaxtrain.optim",
    "jaxtrain.pipeline",
    "jaxtrain.compression",
)

_CONF = BeartypeConf(is_pep484_tower=True)  # an int serves as a float, as type checkers have it
_F = TypeVar("_F", bound=Callable)


def checked(function: _F) -> _F:
    """The type checker that the hook puts around each function; found by its name."""
    return beartype(function, conf=_CONF)


def unchecked(function: _F) -> _F:
    """The function itself: for tests of what it refuses by itself, where no check is around it."""
    return unwrap(function)


def install() -> None:
    """Before the first import of jaxtrain: what is imported by then stays unchecked."""
    if not os.environ.get("JAXTRAIN_UNCHECKED"):
        # It would wrap dataclasses too. Ours say themselves what is wrong with their fields, all at
        # once, and what Python says of a misspelt one is read elsewhere.
        JaxtypingTransformer.visit_ClassDef = JaxtypingTransformer.generic_visit
        install_import_hook(PACKAGES, "typecheck.checked")
