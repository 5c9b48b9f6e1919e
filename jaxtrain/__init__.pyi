"""The public names and where they are: read by type checkers, and by `jaxtrain/__init__.py`."""

from . import checkpoint as checkpoint
from . import collectives as collectives
from . import data as data
from . import mesh as mesh
from . import models as models
from . import nn as nn
from . import optim as optim
from .certificate.certify import certify as certify
from .checkpoint.policy import SavePolicy as SavePolicy
from .checkpoint.verify import verify as verify
from .data import TextData as TextData
from .data import TextFiles as TextFiles
from .experiment import Evaluation as Evaluation
from .experiment import Execution as Execution
from .experiment import Experiment as Experiment
from .experiment import FineTuning as FineTuning
from .experiment import FromHuggingFace as FromHuggingFace
from .experiment import FromRun as FromRun
from .experiment import Logging as Logging
from .experiment import LoRA as LoRA
from .experiment import Sample as Sample
from .experiment import load_experiment as load_experiment
from .mesh.mesh import MeshSpec as MeshSpec
from .mesh.mesh import load_mesh as load_mesh
from .mesh.mesh import mesh_from_axes as mesh_from_axes
from .mesh.sharding import data_parallel as data_parallel
from .mesh.sharding import fsdp as fsdp
from .mesh.sharding import tensor as tensor
from .mesh.sharding import zero1 as zero1
from .mesh.sharding import zero2 as zero2
from .models.block import AttentionConfig as AttentionConfig
from .models.block import BlockConfig as BlockConfig
from .models.block import MlpConfig as MlpConfig
from .models.block import MoeConfig as MoeConfig
from .models.decoder import DecoderConfig as DecoderConfig
from .nn.stack import LayerLoop as LayerLoop
from .optim.optimizer import SGD as SGD
from .optim.optimizer import AdamW as AdamW
from .optim.optimizer import Muon as Muon
from .optim.precision import bf16 as bf16
from .optim.precision import fp32 as fp32
from .optim.schedule import WarmupCosine as WarmupCosine
from .pipeline.config import Pipeline as Pipeline
from .run.callback import Callback as Callback
from .run.callback import Run as Run
from .run.check import check as check
from .run.loop import train as train
from .run.result import Result as Result
from .telemetry.profiler import Steps as Steps
from .weights.export import export as export
from .weights.generate import generate as generate
from .weights.generate import generate_text as generate_text
from .weights.huggingface import huggingface_config as huggingface_config

__all__: list[str]
__version__: str
