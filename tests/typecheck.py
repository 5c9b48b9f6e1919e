"""Shapes and types, checked while tests run: annotations of `PACKAGES` become assertions.

jaxtyping's import hook puts a check around every function of these packages as they are imported;
outside the tests annotations are only read. Measure without it, or look for what it changes, by
`JAXTRAIN_UNCHECKED=1`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import update_wrapper, wraps
from inspect import signature, unwrap
from types import CodeType, FunctionType
from typing import Any, TypeVar

import jaxtyping
from beartype import BeartypeConf, beartype
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


def checked_once(jaxtyped: Callable[..., Any]) -> Callable[..., Any]:
    """The decorator `jaxtyping.jaxtyped`, but for a function within another, which Python makes at
    each call of the other: its checks are made once, where they cost as much as many calls."""
    made: dict[CodeType, tuple[Callable[..., Any], threading.local]] = {}

    def decorator(*, typechecker: Any) -> Callable[[Any], Any]:
        checking = jaxtyped(typechecker=typechecker)

        def decorate(function: Any) -> Any:
            if not isinstance(function, FunctionType) or "<locals>" not in function.__qualname__:
                return checking(function)
            if not function.__annotations__:
                return function
            code = function.__code__
            if code not in made:
                made[code] = _checks_of_all(function, checking)
            checks, now = made[code]

            @wraps(function)
            def checked(*args: Any, **kwargs: Any) -> Any:
                now.function = function
                return checks(*args, **kwargs)

            return checked

        return decorate

    return decorator


def _checks_of_all(
    function: FunctionType, checking: Callable[[Any], Any]
) -> tuple[Callable[..., Any], threading.local]:
    """The checks of all functions of this one's code, and where they find the one to call."""
    now = threading.local()

    def one(*args: Any, **kwargs: Any) -> Any:
        called, now.function = now.function, None
        return called(*args, **kwargs)

    # Annotations are read by the names of the function's own module.
    like = FunctionType(one.__code__, function.__globals__, "one", None, one.__closure__)
    update_wrapper(like, function).__signature__ = signature(function)
    del like.__wrapped__  # keeps no arrays of the first one's
    return checking(like), now


def install() -> None:
    """Before the first import of jaxtrain: what is imported by then stays unchecked."""
    if not os.environ.get("JAXTRAIN_UNCHECKED"):
        # It would wrap dataclasses too. Ours say themselves what is wrong with their fields, all at
        # once, and what Python says of a misspelt one is read elsewhere.
        JaxtypingTransformer.visit_ClassDef = JaxtypingTransformer.generic_visit
        jaxtyping.jaxtyped = checked_once(jaxtyping.jaxtyped)
        jaxtyping.install_import_hook(PACKAGES, "typecheck.checked")
