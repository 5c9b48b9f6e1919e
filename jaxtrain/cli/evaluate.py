"""`jaxtrain evaluate`: the loss of a saved run on its held-out rows, or on other files."""

from __future__ import annotations

import argparse
import json

from jaxtrain.cli.generate import add_trust, trusted
from jaxtrain.cli.shared import JSON, add_mesh, mesh_of, set_simulation_flags


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
    evaluate.add_argument("--json", action="store_true", help=JSON)
    add_trust(evaluate)


def evaluate_command(options: argparse.Namespace) -> int:
    spec = mesh_of(options)
    if spec.simulated:
        set_simulation_flags(options, spec)
    from jaxtrain.inspection.evaluate import evaluate

    values = evaluate(
        options.run_dir,
        options.files,
        mesh=spec,
        split=options.split,
        batches=options.batches,
        averaged=False if options.last else None,
        trust=trusted(options),
    )
    if options.json:
        print(json.dumps(values))
    else:
        print(" ".join(f"{name} {value:.4f}" for name, value in values.items()))
    return 0
