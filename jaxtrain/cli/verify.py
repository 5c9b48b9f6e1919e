"""`jaxtrain verify`: checks every checkpointed byte of a run against its digest."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

from jaxtrain.cli.shared import JSON, text_stream
from jaxtrain.cluster.exit_codes import FAILED


def add_options(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("run_dir", metavar="RUN", help="a run directory, or the address of one")
    verify.add_argument("--json", action="store_true", help=JSON)


def verify_command(options: argparse.Namespace) -> int:
    from jaxtrain.checkpoint.storage import steps_aside, uncommitted_steps
    from jaxtrain.experiment import of_another
    from jaxtrain.files.pointer import checkpoints_in
    from jaxtrain.files.store import any_path
    from jaxtrain.inspection.verify import damaged_reference, require_experiment, verify

    config, foreign = "", dict[str, Any]()
    try:
        foreign["foreign"] = partial(of_another, config=require_experiment(options.run_dir))
    except ValueError as error:
        config = str(error)
    verdicts, out = verify(options.run_dir, **foreign), text_stream(options)
    for verdict in verdicts:
        state = f"DAMAGED in {len(verdict.damages)} places" if verdict.damages else "whole"
        read = f"{verdict.chunks} chunks, {verdict.bytes:,} bytes"
        print(f"step {verdict.step}: {state}; {read}", file=out)
        for line in verdict.damages:
            print(f"  {line}", file=out)
        for line in verdict.foreign:
            print(f"  FOREIGN {line}", file=out)
    if config:
        print(f"DAMAGED {config}", file=out)
    reference = damaged_reference(options.run_dir)
    for line in reference:
        print(f"DAMAGED {line}: the next start computes it again", file=out)
    checkpoints = checkpoints_in(any_path("run_dir", options.run_dir))
    uncommitted = uncommitted_steps(checkpoints)
    for step in uncommitted:
        print(f"step {step}: not committed; it is being saved, or was cut short", file=out)
    if aside := steps_aside(checkpoints):
        kept = ", ".join(aside)
        print(f"passed over by an earlier start, and kept, unread here: {kept}", file=out)
    damaged = [verdict.step for verdict in verdicts if verdict.damages]
    usable = [verdict.step for verdict in verdicts if verdict.usable]
    if len(usable) < len(verdicts):
        then = f"goes on from step {usable[-1]}" if usable else "is refused"
        print(f"a start of this run {then}, unless a local tier has a newer one", file=out)
    if options.json:
        steps = [verdict._asdict() for verdict in verdicts]
        report = {"steps": steps, "damaged": damaged, "aside": aside, "config": config or None}
        print(json.dumps(report | {"reference": reference, "uncommitted": uncommitted}))
    return FAILED if config or reference or len(usable) < len(verdicts) else 0
