"""The same model in torch, `experiments/baselines/torch_llama.py`, on the same rows of documents,
in bf16 by torch.compile, at its best batch."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from jaxtrain.bench_gpu.parts import BATCHES, MODEL
from jaxtrain.bench_gpu.setting import Row, Setting, Skipped

BASELINE = Path(__file__).parents[2] / "experiments" / "baselines" / "torch_llama.py"
SMALL = {"layers": 2, "embed": 32, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 256, "seq": 32}
FULL = "out_of_memory"


def measure(setting: Setting, batch: str) -> None:
    """Measures torch at this batch."""
    smaller = [row for n in BATCHES if n < int(batch) for row in setting.earlier.get(_part(n), [])]
    if full := [row["batch"] for row in smaller if row.get(FULL)]:
        raise Skipped(f"a batch of {full[0]} does not fit")
    setting.tell({"row": f"torch, batch {batch}", **_trained(setting, int(batch))})


def again(setting: Setting, turn: str) -> None:
    """Measures torch at its best batch once more, in its turn with ours."""
    rows = [row for n in BATCHES for row in setting.earlier.get(_part(n), [])]
    fit = [row for row in rows if not row.get(FULL)]
    if not fit:
        raise Skipped("torch has trained at no batch")
    best = max(fit, key=lambda row: row["tokens_per_s"])["batch"]
    setting.tell({"row": f"torch, turn {turn}", **_trained(setting, best)})


def _part(batch: int) -> str:
    return f"{MODEL}/torch/{batch}"


def _trained(setting: Setting, batch: int) -> Row:
    llama = baseline()
    config = replace(llama.PRESETS["llama3_1b"], batch=batch, documents=setting.sizes.mean)
    if setting.sizes.shrunk:
        config = replace(config, **SMALL)
    device = llama.torch.device("cpu" if setting.dry else "cuda")
    steps = llama.WARMUP + llama.ROUNDS * setting.sizes.steps
    peak = setting.chip.peak_flops("bfloat16")
    options = {"compiled": not setting.dry, "device": device, "peak_flops": peak}
    try:
        result = llama.measure(config, dtype="bf16", steps=steps, **options)
    except llama.torch.OutOfMemoryError:
        return {"batch": batch, FULL: True}
    names = ("step_s", "spread", "tokens_per_s", "mfu_causal", "mfu_full", "first_loss", "loss")
    selected = {name: result[name] for name in names}
    return {"batch": batch, **selected, "peak_gb": result["peak_bytes"] / 1e9}


def device_name(*, dry: bool) -> str:
    """Returns torch's name of the device. Raises Skipped without torch, or where it sees no GPU."""
    torch = baseline().torch
    if dry:
        return "cpu"
    if not torch.cuda.is_available():
        raise Skipped("torch sees no GPU here")
    return torch.cuda.get_device_name()


def baseline() -> ModuleType:
    """Returns the baseline's module. Raises Skipped where it, or torch, is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise Skipped("torch is not installed")
    if not BASELINE.is_file():
        raise Skipped(f"there is no {BASELINE}; run from a checkout of jaxtrain")
    if "torch_llama" not in sys.modules:
        spec = importlib.util.spec_from_file_location("torch_llama", BASELINE)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["torch_llama"] = module  # its dataclasses look their module up by name
        spec.loader.exec_module(module)
    return sys.modules["torch_llama"]
