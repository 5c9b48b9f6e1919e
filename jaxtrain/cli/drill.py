"""`jaxtrain drill`: injects every fault, and checks that the run's result stays the same."""

from __future__ import annotations

import argparse

from jaxtrain.cli.shared import JSON, answer, text_stream
from jaxtrain.cluster.exit_codes import FAILED


def add_options(drill: argparse.ArgumentParser) -> None:
    drill.add_argument("experiment", nargs="?")
    drill.add_argument("--processes", type=int, default=2, help="how many; default 2")
    drill.add_argument("--list", action="store_true", help="only tell what would happen")
    drill.add_argument("--json", action="store_true", help=JSON)


def drill_command(options: argparse.Namespace) -> int:
    from jaxtrain.drills.drill import drill
    from jaxtrain.drills.plan import listed

    if options.list:
        listing = listed(options.processes)
        return answer(options, listing, str(listing))
    if options.experiment is None:
        raise ValueError("drill wants an experiment file, or --list alone")
    report = drill(
        options.experiment,
        processes=options.processes,
        tell=lambda text: print(text, flush=True, file=text_stream(options)),
    )
    answer(options, report, str(report))
    return 0 if report.passed else FAILED
