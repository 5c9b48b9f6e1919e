"""One variant of `bench step` in a process of its own: it trains a step on each request.

The processes of a benchmark print lines, a JSON object each. After the first step the worker prints
`compile_s step_s loss`, or only `refused` with the reason. Each line `step` on stdin is then
answered by `step_s loss`; the end of stdin by `peak_bytes program_bytes`. The plain loop has the
same protocol.
"""

from __future__ import annotations

import argparse
import base64
import json
import pickle
import re
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.experiment import Experiment, load_experiment, with_fields
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.optim.precision import bf16, fp32
from jaxtrain.program.collectives import peak_memory

if TYPE_CHECKING:
    from jaxtrain.session.session import Session

PRECISIONS = {"fp32": fp32, "bf16": bf16}


def arguments_of(
    experiment: str | Path,
    spec: MeshSpec,
    *,
    mode: str,
    precision: str,
    settings: Sequence[str] = (),
) -> list[str]:
    """Returns the arguments of a worker, after `python`. settings: as for `with_fields`."""
    packed = base64.b64encode(pickle.dumps(spec)).decode()
    module = ["-m", "jaxtrain.bench.step_worker"]
    return [*module, str(experiment), packed, mode, precision, *settings]


def variant(experiment: Experiment, *, mode: str, precision: str) -> Experiment:
    """Returns the experiment with another execution mode and precision, and the same
    mathematics."""
    execution = replace(experiment.execution, mode=mode)
    return replace(experiment, execution=execution, precision=PRECISIONS[precision])


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m jaxtrain.bench.step_worker")
    for name in ("experiment", "spec", "mode", "precision"):
        parser.add_argument(name)
    parser.add_argument("settings", nargs="*")
    options = parser.parse_args()
    # The imports of `jaxtrain train`, which belong to the first step's time.
    from jaxtrain.files.cache import cache_directory
    from jaxtrain.session.session import open_session

    spec = pickle.loads(base64.b64decode(options.spec))
    experiment = with_fields(load_experiment(options.experiment), options.settings)
    experiment = variant(experiment, mode=options.mode, precision=options.precision)
    try:
        session = open_session(experiment, spec, cache_dir=cache_directory())
    except ValueError as error:
        _say(refused=str(error))
        return 2
    try:
        _take_turns(session)
    finally:
        session.close()
    return 0


def _take_turns(session: Session) -> None:
    step = _timed_step(session)
    first = step()
    _say(compile_s=session.compile_s, **first)
    for line in sys.stdin:
        if line != "step\n":
            raise ValueError(f"a benchmark's worker was told {line!r}; it knows only 'step'")
        _say(**step())
    program = session.compiled[session.assembly.largest_batch]
    _say(peak_bytes=peak_bytes(), program_bytes=peak_memory(program)["peak_bytes"])


def _timed_step(session: Session) -> Callable[[], dict[str, float]]:
    import jax

    def step() -> dict[str, float]:
        began = time.perf_counter()
        _, batch = session.loader.next()
        metrics = session.step(batch)
        jax.block_until_ready((session.state, metrics))
        return {"step_s": time.perf_counter() - began, "loss": float(metrics["loss"])}

    return step


def peak_bytes() -> int:
    """Returns the peak bytes of the first device, or, where none are counted (CPU), of this
    process."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    status = Path("/proc/self/status")
    if status.exists():
        # Linux starts ru_maxrss at the peak of the process that forked; VmHWM is this program's.
        match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if match:
            return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    raise SystemExit(_main())
