"""jaxtrain: a sharded training stack on JAX. One experiment file and one mesh file.

    import jaxtrain
    jaxtrain.train("experiments/stdlib_lm.py", jaxtrain.mesh_from_axes(fsdp=8))

Names are imported when they are first used: `import jaxtrain` does not import JAX, so that device
counts and platforms can still be set. Those that `__init__.pyi` lists are public.
"""

from __future__ import annotations

from typing import Any

import lazy_loader

from jaxtrain.public import hint

__version__ = "0.1.0"

_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A public name, imported now. Raises AttributeError saying where it is, or what is near it."""
    try:
        return _listed(name)
    except AttributeError as error:
        raise AttributeError(f"jaxtrain has no {name}{hint(name)}") from error
