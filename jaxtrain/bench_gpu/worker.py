"""One part of `bench gpu` in a process of its own, which prints lines, a JSON object each.

First `device` and `chip`, JAX's name and the mesh file's; then `row`, for each result; `skipped` or
`failed` with the reason. `refused` is the reason to end the whole benchmark.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

from jaxtrain.bench.processes import end_with_parent
from jaxtrain.bench_gpu import parts, peer
from jaxtrain.bench_gpu.results import read_results
from jaxtrain.bench_gpu.setting import Row, Setting, Skipped
from jaxtrain.cluster.exit_codes import REFUSED

FRACTION = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def environment(part: str, *, dry: bool, out: Path, environ: dict[str, str]) -> dict[str, str]:
    """Returns the environment of a part's process: one GPU and most of its memory, unless the user
    has chosen others, and compilation caches below `out`. In torch's parts JAX has only the CPU,
    and leaves the GPU's memory to torch."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(p for p in (root, environ.get("PYTHONPATH")) if p)
    own = {
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
        "TORCHINDUCTOR_CACHE_DIR": str(out / "torch"),
        "PYTHONPATH": path,
    }
    if dry or parts.of_torch(part):
        own["JAX_PLATFORMS"] = "cpu"
    chosen = {"CUDA_VISIBLE_DEVICES": "0"}
    if not any(name in environ for name in FRACTION):
        chosen[FRACTION[0]] = "0.92"
    return chosen | environ | own


def device_name(part: str, *, dry: bool) -> str:
    """Returns the name of the measured device; for torch's parts torch's name, since JAX must not
    allocate its memory. Raises Skipped where torch has none, ValueError where there is no
    accelerator."""
    if parts.of_torch(part):
        return peer.device_name(dry=dry)
    if dry:
        return "cpu"
    import jax

    device = jax.devices()[0]
    if device.platform == "cpu":
        raise ValueError("JAX sees no accelerator here; --dry-run goes through all parts on a CPU")
    return device.device_kind


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.bench_gpu.worker")
    parser.add_argument("part", choices=parts.PARTS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mesh")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    end_with_parent()
    earlier = {name: result.rows for name, result in read_results(options.out).items()}
    try:
        device = device_name(options.part, dry=options.dry_run)
        setting = Setting(options.dry_run, device, options.mesh, earlier, options.out, _tell)
        _say(device=device, chip=setting.chip.name)
        measure, argument = parts.measured_by(options.part)
    except Skipped as reason:
        _say(skipped=str(reason))
        return 0
    except ValueError as error:
        _say(refused=str(error))
        return REFUSED
    try:
        measure(setting, argument)
    except Skipped as reason:
        _say(skipped=str(reason))
    except Exception as error:
        _say(failed=f"{type(error).__name__}: {error}")  # behind it JAX's traceback says more
        raise
    return 0


def _tell(row: Row) -> None:
    _say(row={name: _plain(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    """Returns a value for JSON: a number that is not finite as a text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    raise SystemExit(_main())
