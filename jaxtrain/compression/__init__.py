"""Compressed sums of gradients: codecs, what they carry to the next step, and when sums are exact.

Does not belong here: exact collectives (collectives/). To read first: error feedback (Seide et al.
2014; Karimireddy et al. 2019) and PowerSGD (Vogels et al. 2019).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
