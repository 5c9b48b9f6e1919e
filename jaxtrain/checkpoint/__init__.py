"""Checkpoints: a save is committed or it does not exist, and it restores onto any mesh.

What is stored is logical: leaves under their natural paths and shapes, and a small JSON record.
Nothing about mesh, stages or hosts is in it, nor which container type held a leaf. The writer is
Orbax, asynchronous, behind an interface of ours that never drops a save silently. The configuration
that a run directory was made from is kept, and compared, here too.

Does not belong here: when to train, evaluate or stop (run/), what an experiment is
(experiment/), how a leaf is placed on a mesh (mesh/sharding.py).

Read: Mohan, Phanishayee, Chidambaram, "CheckFreq: Frequent, Fine-Grained DNN Checkpointing" (FAST
2021), for saving behind the next steps; Wan et al., "ByteCheckpoint: A Unified Checkpointing System
for Large Foundation Model Development" (2024), for state that is stored apart from how it is split.
"""

from __future__ import annotations

from jaxtrain.checkpoint.manager import CheckpointManager
from jaxtrain.checkpoint.policy import Best, Keep, LocalTier, Minutes, SavePolicy
from jaxtrain.checkpoint.run_config import (
    ABSENT,
    FieldDifference,
    compare_config,
    read_config,
    refuse_other_experiment,
    write_config,
)
from jaxtrain.checkpoint.storage import (
    CheckpointError,
    DamagedCheckpoint,
    check_writable,
    committed_steps,
)
from jaxtrain.state_format.leaves import named_leaves, stored_bytes

__all__ = [
    "ABSENT",
    "Best",
    "CheckpointError",
    "CheckpointManager",
    "DamagedCheckpoint",
    "FieldDifference",
    "Keep",
    "LocalTier",
    "Minutes",
    "SavePolicy",
    "check_writable",
    "committed_steps",
    "compare_config",
    "named_leaves",
    "read_config",
    "refuse_other_experiment",
    "stored_bytes",
    "write_config",
]
