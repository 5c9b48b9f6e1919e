"""Training: the state, the step, the loop around it, and the certificate that meshes agree.

The step is written once; what a mesh changes is in `gradients.py`. To read first: ZeRO
(Rajbhandari et al. 2020) and the sequence-parallel paper (Korthikanti et al. 2022).

The package can be called: `jaxtrain.train(experiment, mesh)` is `jaxtrain.train.loop.train`. Python
binds `jaxtrain.train` to this package as soon as any module of it is imported, over a function of
that name.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from jaxtrain.train.loop import train

        return train(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
