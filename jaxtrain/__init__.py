"""jaxtrain: a sharded training stack on JAX. One experiment file and one mesh file.

    import jaxtrain
    jaxtrain.train("experiments/stdlib_lm.py", jaxtrain.mesh_from_axes(fsdp=8))

Names are imported when they are first used: `import jaxtrain` does not import JAX, so that device
counts and platforms can still be set. Those that `__init__.pyi` lists are public.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
