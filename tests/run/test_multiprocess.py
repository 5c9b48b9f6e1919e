"""Several processes: the same losses as one, each reading its own rows, on one run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import process_group
import pytest

from jaxtrain.validation.own_data import TRIED

BATCH, STEPS = 8, 40

WORKER = """
import json, os, sys, time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

processes, index, port, stops, run, out = sys.argv[1:]
processes, index, stops = int(processes), int(index), stops == "True"
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4 // processes)
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=index)
import jaxtrain

read = []


@dataclass(frozen=True)
class Counted:
    chain: Any

    def open(self, split, *, seed, cache_dir):
        dataset = self.chain.open(split, seed=seed, cache_dir=cache_dir)
        rows = dataset.rows

        def counted(indices):
            if split == "train":
                read.append([int(i) for i in indices])
            return rows(indices)

        dataset.rows = counted
        return dataset


class Asks(jaxtrain.Callback):
    '''For a save after the first step on the last process, and of several for a stop on the first,
    both long before they are done by all.'''

    saves = []

    def after_step(self, run, step):
        time.sleep(0.03)
        if step == 1 and index == processes - 1:
            run.save()
        if step == 10 and index == 0 and stops:
            run.stop()

    def after_save(self, run, step):
        self.saves.append(step)


block = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
)
experiment = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(
        vocab=16, embed=8, layers=1, period=(block,), tied=True, vocab_multiple=16
    ),
    data=Counted(jaxtrain.data.BigramChain(vocab=16, seq=8, isolate_documents=True)),
    optimizer=jaxtrain.AdamW(1e-2),
    steps=STEPS,
    batch=BATCH,
    evaluation=jaxtrain.Evaluation(every=20, batches=1, final_batches=1),
    checkpoints=jaxtrain.SavePolicy(every=100),
    logging=jaxtrain.Logging(every=1, tensorboard=False),
)
result = jaxtrain.train(
    experiment,
    jaxtrain.mesh_from_axes(data=2, fsdp=2),
    run_dir=run,
    callbacks=[Asks()],
    cache_dir=Path(out).parent / f"cache{index}",
)
found = {
    "losses": [line["loss"] for line in result.history],
    "evaluation": result.evaluation.get("eval_loss"),
    "read": read,
    "saves": Asks.saves,
    "stopped": result.stopped,
}
Path(out).write_text(json.dumps(found))
""".replace("STEPS", str(STEPS)).replace("BATCH", str(BATCH))


def run(folder: Path, name: str, *, processes: int, stops: bool = False) -> list[dict[str, Any]]:
    """What each process reports; `name` is the run directory they share."""
    (folder / "worker.py").write_text(WORKER)
    outs = [folder / f"{name}-{processes}-{index}.json" for index in range(processes)]
    process_group.run(
        folder,
        processes,
        lambda index, port: ["worker.py", processes, index, port, stops, name, outs[index]],
    )
    return [json.loads(out.read_text()) for out in outs]


@pytest.mark.slow
def test_two_processes_train_as_one_and_hand_over(tmp_path: Path) -> None:
    (one,) = run(tmp_path, "one", processes=1)
    two = run(tmp_path, "two", processes=2, stops=True)
    assert all(each["stopped"] for each in two) and not one["stopped"]
    done = len(two[0]["losses"])
    assert 10 < done < STEPS and two[0]["losses"] == two[1]["losses"]
    assert two[0]["saves"] == two[1]["saves"] == [two[0]["saves"][0], done]
    assert one["saves"] == [1, STEPS] and 1 < two[0]["saves"][0] < done
    assert two[0]["losses"] == pytest.approx(one["losses"][:done], rel=1e-6)

    # What two processes saved, one goes on with.
    (rest,) = run(tmp_path, "two", processes=1)
    assert rest["losses"] == pytest.approx(one["losses"][done:], rel=1e-6)
    assert rest["evaluation"] == pytest.approx(one["evaluation"], rel=1e-6)
    logged = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == [*range(1, STEPS + 1)], "one writes"

    # Half of the rows of every batch each, and all of them together; when data is opened its first
    # rows are looked at.
    looked_at = [[*range(n)] for n in (1, 2, TRIED)]
    steps = [[rows for rows in each["read"] if rows not in looked_at][:2] for each in two]
    for number, rows in enumerate(zip(*steps, strict=True)):
        assert sorted(map(len, rows)) == [BATCH // 2, BATCH // 2]
        assert sorted([*rows[0], *rows[1]]) == list(range(number * BATCH, (number + 1) * BATCH))
