"""A trained model looked at: as a module, its loss on other data, the log-probability of a token.

`opened.py` opens a run's step on a mesh, without the optimizer's state, and `given.py` what it is
looked at with; `load.py`, `evaluate.py`, `score.py` and `capture.py` have the public functions;
`score_step.py` is the program that gives a loss for each token.

Not here: evaluations during a run (session/), generated texts (weights/), and training.
Read first: Biderman et al. 2024, Lessons from the Trenches on Reproducible Evaluation.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
