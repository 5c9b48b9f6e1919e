"""One process of a run on four devices: trains, and says what it saw; `main` is for one that is
started for it, and meets others first."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

BATCH, STEPS = 8, 40
READ: list[list[int]] = []


@dataclass(frozen=True)
class Counted:
    """The rows of `chain`; which those are that a step trains on is kept in `READ`."""

    chain: Any

    def open(self, split, *, seed, cache_dir):
        dataset = self.chain.open(split, seed=seed, cache_dir=cache_dir)
        rows = dataset.rows

        def counted(indices):
            if split == "train":
                READ.append([int(i) for i in indices])
            return rows(indices)

        dataset.rows = counted
        return dataset


def train(run: Path, *, processes: int = 1, index: int = 0, stops: bool = False) -> dict[str, Any]:
    """Trains in the run directory `run`, and returns what this process saw. It asks for a save
    after the first step on the last process, and with `stops` for a stop on the first, both long
    before they are done by all."""
    import jaxtrain

    class Asks(jaxtrain.Callback):
        def __init__(self) -> None:
            self.saves: list[int] = []

        def after_step(self, run, step):
            if processes > 1:
                time.sleep(0.03 if step < 12 else 0.2)  # once all is asked for, it is soon agreed
            if step == 1 and index == processes - 1:
                run.save()
            if step == 10 and index == 0 and stops:
                run.stop()

        def after_save(self, run, step):
            self.saves.append(step)

    block = jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
    )
    data = Counted(jaxtrain.data.BigramChain(vocab=16, seq=8, isolate_documents=True))
    experiment = jaxtrain.Experiment(
        model=jaxtrain.DecoderConfig(
            vocab=16, embed=8, layers=1, period=(block,), tied=True, vocab_multiple=16
        ),
        data=data,
        optimizer=jaxtrain.AdamW(1e-2),
        steps=STEPS,
        batch=BATCH,
        evaluation=jaxtrain.Evaluation(every=20, batches=1, final_batches=1),
        checkpoints=jaxtrain.SavePolicy(every=100),
        logging=jaxtrain.Logging(every=1, tensorboard=False),
    )
    asks = Asks()
    result = jaxtrain.train(
        experiment,
        jaxtrain.mesh_from_axes(data=2, fsdp=2),
        run_dir=run,
        callbacks=[asks],
        cache_dir=run.parent / f"cache{index}",
    )
    return {
        "losses": [line["loss"] for line in result.history],
        "evaluation": result.evaluation.get("eval_loss"),
        "read": READ,
        "saves": asks.saves,
        "stopped": result.stopped,
    }


def main() -> None:
    """Trains with others, until it is told to stop."""
    count, here, port, run_dir, out = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 // int(count))
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=int(count), process_id=int(here))
    found = train(Path(run_dir), processes=int(count), index=int(here), stops=True)
    Path(out).write_text(json.dumps(found))
