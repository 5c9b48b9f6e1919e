"""Fine-tuning on several processes: the same losses as on one, each reading its own shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import process_group
import pytest

WORKER = """
import json, sys
from pathlib import Path

processes, index, port, start, run, out = sys.argv[1:]
processes, index = int(processes), int(index)
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4 // processes)
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=index)
import jaxtrain
from jaxtrain.state_format import reader

read, read_chunk = [], reader.read_chunk


def counted(pack, chunk, dtype):
    read.append(chunk.size)
    return read_chunk(pack, chunk, dtype)


reader.read_chunk = counted
block = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
)
tuning = None
if start == "here and there":
    tuning = jaxtrain.FineTuning(jaxtrain.FromRun("source" if index == 0 else "nowhere"))
elif start != "none":
    tuning = jaxtrain.FineTuning(jaxtrain.FromRun(start), lora=jaxtrain.LoRA(2, 4.0))
experiment = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(
        vocab=16, embed=8, layers=2, period=(block,), tied=True, vocab_multiple=16
    ),
    data=jaxtrain.data.BigramChain(vocab=16, seq=8, isolate_documents=True),
    optimizer=jaxtrain.AdamW(1e-2),
    steps=3,
    batch=8,
    evaluation=None,
    logging=jaxtrain.Logging(every=1, tensorboard=False),
    fine_tuning=tuning,
)
mesh = jaxtrain.mesh_from_axes(fsdp=4)
try:
    cache = Path(out).parent / f"cache{index}"
    result = jaxtrain.train(experiment, mesh, run_dir=run, cache_dir=cache)
    found = {"losses": [line["loss"] for line in result.history], "read": sum(read)}
except ValueError as error:
    found = {"error": str(error)}
Path(out).write_text(json.dumps(found))
"""


def run(folder: Path, name: str, *, processes: int, start: str) -> list[dict[str, Any]]:
    """What each process reports of a run in the directory `name`."""
    (folder / "worker.py").write_text(WORKER)
    outs = [folder / f"{name}-{index}.json" for index in range(processes)]
    process_group.run(
        folder,
        processes,
        lambda index, port: ["worker.py", processes, index, port, start, name, outs[index]],
    )
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.exhaustive
def test_two_processes_begin_from_a_run_as_one_does(tmp_path: Path) -> None:
    run(tmp_path, "source", processes=1, start="none")
    (one,) = run(tmp_path, "one", processes=1, start="source")
    two = run(tmp_path, "two", processes=2, start="source")
    assert two[0]["losses"] == two[1]["losses"]
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=1e-6)
    norms = 4 * (2 * 2 + 1) * 8  # whole on every device: each reads them
    told = [each["error"] for each in run(tmp_path, "x", processes=2, start="here and there")]
    assert told[0].startswith("process 1: ") and "nowhere/checkpoints has no committed" in told[0]
    assert told[0] == told[1], "nobody waits for the one that failed"
    assert [each["read"] - norms for each in two] == [(one["read"] - norms) // 2] * 2
