"""Tasks of lm-evaluation-harness: which ones (`tasks.py`), a model as the harness takes one
(`language_model.py`), and the metrics of tasks by it (`running.py`).

Tasks themselves, their prompts and metrics do not belong here: the harness has them. Read first:
Biderman et al., "Lessons from the Trenches on Reproducible Evaluation of Language Models" (2024).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
