"""`jaxtrain runs`: lists the runs of a folder."""

from __future__ import annotations

import argparse

from jaxtrain.cli.shared import JSON, answer


def add_options(runs: argparse.ArgumentParser) -> None:
    runs.add_argument("folder", nargs="?", default="runs", help="default runs")
    runs.add_argument("--json", action="store_true", help=JSON)


def runs_command(options: argparse.Namespace) -> int:
    from jaxtrain.inspection.listing import runs

    found = runs(options.folder)
    return answer(options, found, str(found))
