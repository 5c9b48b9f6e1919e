"""The parts of `bench gpu` in the order of their runs: those that others need and the most
informative first. A name is that of groups within groups; this module maps a group to the function
that measures it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from jaxtrain.bench_gpu.setting import Setting

KERNELS = ("cudnn", "triton", "mosaic", "splash", "blockwise", "blockwise_1024")
REMAT = ("none", "attention", "dots", "full")
"""Policies other than the default of accelerators, which all other parts use."""
CHUNKS = (2048, 8192, 16384)
"""Tokens of the head's chunks, beside the chip's own: 4096 on an H100 or H200."""
FLAGS: dict[str, dict[str, bool | str]] = {
    "no_rematerialization": {"xla_disable_hlo_passes": "rematerialization"},
    "no_triton_gemm": {"xla_gpu_enable_triton_gemm": False},
    "cublaslt": {"xla_gpu_enable_cublaslt": True},
    "latency_hiding": {"xla_gpu_enable_latency_hiding_scheduler": True},
    "no_command_buffers": {"xla_gpu_enable_command_buffer": ""},
}
"""Options of the compiler, each by itself."""
PRECISIONS = ("fp8", "fp8_delayed", "int8")
"""Products in 8 bits, beside the experiment's bf16."""
BATCHES = (4, 8, 16, 32)
"""Rows a step of torch's; after one that does not fit no larger one is tried."""

MODEL = "llama3_1b"
PARTS = (
    "calibration",
    *(f"attention/{kernel}" for kernel in KERNELS),
    *(f"{MODEL}/{case}" for case in ("batch", "largest", "half")),
    *(f"{MODEL}/torch/{batch}" for batch in BATCHES),
    *(f"{MODEL}/turn/{library}/{turn}" for turn in (1, 2) for library in ("jaxtrain", "torch")),
    *(f"sweep/precision/{name}" for name in PRECISIONS),
    *(f"sweep/remat/{policy}" for policy in REMAT),
    "sweep/scanned",
    *(f"sweep/chunk/{tokens}" for tokens in CHUNKS),
    *(f"sweep/flag/{name}" for name in FLAGS),
    *(f"experts/{layer}" for layer in ("jaxtrain", "loop", "ragged_dot", "mosaic")),
    "save",
)
_MEASURED_BY = {
    "calibration": "calibration:calibrate",
    "attention": "layer:measure",
    f"{MODEL}/torch": "peer:measure",
    f"{MODEL}/turn/jaxtrain": "model:again",
    f"{MODEL}/turn/torch": "peer:again",
    MODEL: "model:step",
    "sweep/precision": "model:precision",
    "sweep/remat": "model:other_remat",
    "sweep/scanned": "model:scanned",
    "sweep/chunk": "model:chunk",
    "sweep/flag": "model:flag",
    "experts": "experts:measure",
    "save": "saving:measure",
}


def within(part: str, group: str) -> bool:
    """True if the part belongs to the group, or is the group itself."""
    return part == group or part.startswith(f"{group}/")


def groups_of(part: str) -> list[str]:
    """Returns the groups of a part, the outermost first; the part itself where it has none."""
    words = part.split("/")
    return ["/".join(words[:n]) for n in range(1, len(words))] or [part]


def of_torch(part: str) -> bool:
    """True if torch uses the device in this part."""
    return any(within(part, f"{MODEL}/{group}") for group in ("torch", "turn/torch"))


def measured_by(part: str) -> tuple[Callable[[Setting, str], None], str]:
    """Returns (function, argument) that measure a part: function(setting, argument). The argument
    follows the group in the part's name. Only the function's own module is imported."""
    group = next(group for group in _MEASURED_BY if within(part, group))
    module, _, name = _MEASURED_BY[group].partition(":")
    function = getattr(import_module(f"{__package__}.{module}"), name)
    return function, part.removeprefix(group).removeprefix("/")
