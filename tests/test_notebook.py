"""Training in a notebook: a cell is interrupted, and the next one goes on from the saved step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SETUP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import time
from pathlib import Path
import jaxtrain

class Waits(jaxtrain.Callback):
    # At step 25 until the cell has been interrupted.

    def after_step(self, run, step):
        while step == 25 and not Path("interrupted").exists():
            time.sleep(0.01)

block = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
)
experiment = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(
        vocab=16, embed=8, layers=1, period=(block,), tied=True, vocab_multiple=16
    ),
    data=jaxtrain.data.BigramChain(vocab=16, seq=8),
    optimizer=jaxtrain.AdamW(1e-2),
    steps=60,
    batch=4,
    evaluation=None,
    logging=jaxtrain.Logging(every=5, tensorboard=False),
)
mesh = jaxtrain.mesh_from_axes(fsdp=2)
"""
TRAIN = """
result = jaxtrain.train(
    experiment, mesh, run_dir="run", cache_dir="cache", callbacks=[Waits()]
)
"""
REPORT = """
import json
whole = jaxtrain.train(experiment, mesh, cache_dir="cache", stream=open("whole.txt", "w"))
first = result.history[0]["step"]
same = [line["loss"] for line in whole.history[first - 1:]] == [
    line["loss"] for line in result.history
]
print(json.dumps({"first": first, "steps": result.steps, "same": same}))
"""


async def interrupted_and_continued(folder: Path) -> list:
    """The cells after: set up, train (interrupted), train again, report."""
    import nbformat
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(text) for text in (SETUP, TRAIN, TRAIN, REPORT)]
    book = nbformat.v4.new_notebook(cells=cells)
    client = NotebookClient(
        book, timeout=240, allow_errors=True, resources={"metadata": {"path": str(folder)}}
    )
    metrics = folder / "run" / "metrics.jsonl"

    def under_way() -> bool:
        return metrics.exists() and metrics.read_text().count("\n") > 3

    async with client.async_setup_kernel():
        await client.async_execute_cell(cells[0], 0)
        training = asyncio.create_task(client.async_execute_cell(cells[1], 1))
        while not (training.done() or under_way()):
            await asyncio.sleep(0.02)
        await client.km.interrupt_kernel()
        (folder / "interrupted").touch()
        await training
        for index in (2, 3):
            await client.async_execute_cell(cells[index], index)
    return book.cells


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_cell_is_interrupted_and_the_next_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the extra `test`")
    setup, first, second, report = asyncio.run(interrupted_and_continued(tmp_path))
    assert not [o for o in setup.outputs if o.output_type == "error"], setup.outputs
    (error,) = [o for o in first.outputs if o.output_type == "error"]
    assert error.ename == "KeyboardInterrupt"
    text = "".join(o.text for o in first.outputs if o.output_type == "stream")
    assert "interrupted; saved step" in text
    assert not [o for o in second.outputs if o.output_type == "error"], second.outputs
    said = "".join(o.text for o in second.outputs if o.output_type == "stream")
    saved = int(text.split("saved step ")[1].split()[0])
    assert 0 < saved <= 25 and f"resuming at step {saved}" in said
    found = json.loads(report.outputs[-1].text.splitlines()[-1])
    assert found == {"first": saved + 1, "steps": 60, "same": True}
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == sorted(set(steps)) and steps[-1] == 60
