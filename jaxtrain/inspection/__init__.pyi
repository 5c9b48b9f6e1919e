"""The public names and where they are: read by type checkers, and by `__init__.py`."""

from .capture import capture as capture
from .capture import gradients as gradients
from .score import Scored as Scored
from .score import score_rows as score_rows
from .tasks import evaluate_tasks as evaluate_tasks
from .tasks import harness_model as harness_model

__all__: list[str]
