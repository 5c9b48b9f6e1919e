"""Two processes train; one is killed with its machine, and the run goes on from the local tier."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import process_group
import pytest

STEPS = 8

WORKER = """
import json, os, signal, sys
from pathlib import Path

index, port, folder, die_at = sys.argv[1:]
index, die_at = int(index), int(die_at)
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=index)
import jaxtrain

block = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
)
local = jaxtrain.checkpoint.LocalTier(every=1, directory=f"{folder}/host{{process}}")
experiment = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(
        vocab=16, embed=8, layers=1, period=(block,), tied=True, vocab_multiple=16
    ),
    data=jaxtrain.data.BigramChain(vocab=16, seq=8, isolate_documents=True),
    optimizer=jaxtrain.AdamW(1e-2),
    steps=STEPS,
    batch=8,
    evaluation=None,
    checkpoints=jaxtrain.SavePolicy(every=jaxtrain.checkpoint.Minutes(60), local=local),
    logging=jaxtrain.Logging(every=1, tensorboard=False),
)
asked = []


class Die(jaxtrain.Callback):
    def after_step(self, run, step):
        asked.append(1)
        if len(asked) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)


result = jaxtrain.train(
    experiment, jaxtrain.mesh_from_axes(data=2, fsdp=2), run_dir=f"{folder}/run",
    cache_dir=f"{folder}/cache{index}", callbacks=[Die()],
)
rows = result.history
found = {"steps": [row["step"] for row in rows], "losses": [row["loss"] for row in rows]}
Path(f"{folder}/out{index}.json").write_text(json.dumps(found))
""".replace("STEPS", str(STEPS))


def start(folder: Path, die_at: tuple[int, int] = (0, 0)) -> tuple[list[int | None], str]:
    """Exit codes and what was said; all are killed once one has been."""
    folder.mkdir(exist_ok=True)
    (folder / "worker.py").write_text(WORKER)
    with (folder / "said").open("w") as said:
        started = process_group.start(
            folder, 2, lambda i, port: ["worker.py", i, port, folder, die_at[i]], out=said
        )
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            codes = [process.poll() for process in started]
            if None not in codes or any(code for code in codes):
                break
            time.sleep(0.1)
        for process in started:
            process.kill()
            process.wait()
    return codes, (folder / "said").read_text()


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out0.json").read_text())


@pytest.mark.exhaustive
def test_a_run_whose_machine_is_lost_goes_on_from_the_local_tier(tmp_path: Path) -> None:
    codes, said = start(tmp_path / "whole")
    assert codes == [0, 0], said
    whole = told(tmp_path / "whole")
    lost = tmp_path / "lost"
    codes, said = start(lost, die_at=(0, 6))
    assert codes[1] == -9, said
    shutil.rmtree(lost / "host1")
    assert not list((lost / "run" / "checkpoints").glob("*")) and (lost / "run" / ".run").is_file()
    codes, said = start(lost)
    assert codes == [0, 0], said
    assert "comes from the local tier" in said
    found = told(lost)
    first = found["steps"][0]
    assert 4 <= first <= 7, "all but the last saves were whole"
    assert found["losses"] == whole["losses"][first - 1 :]
