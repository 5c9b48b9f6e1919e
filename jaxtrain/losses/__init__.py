"""Losses of a model with a head: cross-entropy, and preferences between two answers.

Both are fused with the output head: logits exist for one chunk of tokens at a time.
To read first: Shoeybi et al. 2019, section 3, on a vocabulary that is split over devices, and
Rafailov et al. 2023 on preferences.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
