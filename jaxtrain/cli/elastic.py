"""`jaxtrain elastic`: plans a run on fewer machines than its mesh has."""

from __future__ import annotations

import argparse

from jaxtrain.cli.shared import JSON, MESH, answer, experiment_of, mesh_of


def add_options(elastic: argparse.ArgumentParser) -> None:
    elastic.add_argument("experiment")
    elastic.add_argument("--mesh", required=True, help=MESH)
    elastic.add_argument("--simulate", action="store_true", help="as train has it")
    elastic.add_argument("--machines", type=int, required=True, help="of the whole mesh")
    elastic.add_argument("--json", action="store_true", help=JSON)


def elastic_command(options: argparse.Namespace) -> int:
    from jaxtrain.machines.elastic import elastic

    plans = elastic(experiment_of(options), mesh_of(options), options.machines)
    return answer(options, plans, str(plans))
