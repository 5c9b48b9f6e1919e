"""An experiment: a frozen value, loaded from a Python file and checked against a mesh.

Packages below this one do not import Experiment; packages above take one as input.
"""

from jaxtrain.experiment.fields import (
    Evaluation,
    Execution,
    Experiment,
    Health,
    Logging,
    LossSpikes,
    Sample,
)
from jaxtrain.experiment.fine_tuning import FineTuning, FromHuggingFace, FromRun, LoRA, Start
from jaxtrain.experiment.load import config_of, load_experiment
from jaxtrain.experiment.settings import with_fields
from jaxtrain.experiment.stored import RESUMABLE, completed, of_another, resumable

__all__ = [
    "RESUMABLE",
    "Evaluation",
    "Execution",
    "Experiment",
    "FineTuning",
    "FromHuggingFace",
    "FromRun",
    "Health",
    "LoRA",
    "Logging",
    "LossSpikes",
    "Sample",
    "Start",
    "completed",
    "config_of",
    "load_experiment",
    "of_another",
    "resumable",
    "with_fields",
]
