"""`jaxtrain evaluate`: a saved run's loss on its held-out rows or on other files, and tasks."""

from __future__ import annotations

import argparse
import json
import sys

from jaxtrain.cli.generate import add_trust, trusted
from jaxtrain.cli.shared import JSON, add_mesh, mesh_of, set_simulation_flags
from jaxtrain.notices import told_to


def add_options(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument(
        "run_dir", metavar="RUN[@STEP]", help="a run directory; default newest step"
    )
    add_mesh(evaluate)
    evaluate.add_argument("--simulate", action="store_true", help="for fake CPU devices instead")
    text = "texts to read in place of the run's held-out rows: .jsonl, .csv, .parquet or plain text"
    evaluate.add_argument("--files", nargs="+", action="extend", metavar="PATTERN", help=text)
    evaluate.add_argument("--split", choices=("held_out", "train"), help="of the run's own data")
    evaluate.add_argument("--batches", type=int, help="of the run's size; default all rows")
    text = "the last weights, of a run that keeps averaged ones"
    evaluate.add_argument("--last", action="store_true", help=text)
    text = "tasks of lm-evaluation-harness, in place of losses: names or patterns (extra `eval`)"
    evaluate.add_argument("--tasks", nargs="+", action="extend", metavar="TASK", help=text)
    text = "with --tasks: a folder of task files of your own"
    evaluate.add_argument("--task-folder", metavar="FOLDER", help=text)
    text = "with --tasks: documents of each; default all"
    evaluate.add_argument("--limit", type=int, metavar="N", help=text)
    text = "with --tasks: solved examples in a prompt; default the task's own number"
    evaluate.add_argument("--examples", type=int, metavar="N", help=text)
    evaluate.add_argument("--json", action="store_true", help=JSON)
    add_trust(evaluate)


def evaluate_command(options: argparse.Namespace) -> int:
    _refuse_mixed(options)
    spec = mesh_of(options)
    if spec.simulated:
        set_simulation_flags(options, spec)
    weights = dict(averaged=False if options.last else None, trust=trusted(options))
    if options.tasks is not None:
        from jaxtrain.inspection.tasks import evaluate_tasks

        with told_to(lambda text: print(text, file=sys.stderr)):
            values = evaluate_tasks(
                options.run_dir,
                options.tasks,
                folder=options.task_folder,
                limit=options.limit,
                examples=options.examples,
                mesh=spec,
                **weights,
            )
    else:
        from jaxtrain.inspection.evaluate import evaluate

        values = evaluate(
            options.run_dir,
            options.files,
            mesh=spec,
            split=options.split,
            batches=options.batches,
            **weights,
        )
    if options.json:
        print(json.dumps(values))
    else:
        print(" ".join(f"{name} {value:.4f}" for name, value in values.items()))
    return 0


def _refuse_mixed(options: argparse.Namespace) -> None:
    """Raises ValueError for options of losses with tasks, and of tasks without."""
    of_losses = {"--files": options.files, "--split": options.split, "--batches": options.batches}
    of_tasks = {
        "--task-folder": options.task_folder,
        "--limit": options.limit,
        "--examples": options.examples,
    }
    has_tasks = options.tasks is not None
    other = of_losses if has_tasks else of_tasks
    if names := [name for name, value in other.items() if value is not None]:
        instead = "of losses: leave out --tasks" if has_tasks else "of tasks: name some by --tasks"
        raise ValueError(f"{', '.join(names)} is an option {instead}")
