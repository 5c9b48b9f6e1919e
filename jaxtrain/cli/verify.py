"""`jaxtrain verify`: every checkpointed byte of a run against its digest."""

from __future__ import annotations

import argparse
import json

from jaxtrain.cli.shared import JSON, text_stream
from jaxtrain.cluster.exit_codes import FAILED


def add_options(verify: argparse.ArgumentParser) -> None:
    verify.add_argument("run_dir", metavar="RUN", help="a run directory")
    verify.add_argument("--json", action="store_true", help=JSON)


def verify_command(options: argparse.Namespace) -> int:
    from jaxtrain.checkpoint.verify import config_damage, verify

    verdicts, out = verify(options.run_dir), text_stream(options)
    for found in verdicts:
        state = f"DAMAGED in {len(found.damages)} places" if found.damages else "whole"
        read = f"{found.chunks} chunks, {found.bytes:,} bytes"
        print(f"step {found.step}: {state}; {read}", file=out)
        for damage in found.damages:
            print(f"  {damage}", file=out)
    config = config_damage(options.run_dir)
    if config:
        print(f"DAMAGED {config}", file=out)
    damaged = [found.step for found in verdicts if found.damages]
    if damaged:
        good = [found.step for found in verdicts if not found.damages]
        then = f"goes on from step {good[-1]}" if good else "is refused"
        print(f"a start of this run {then}, unless a local tier has a newer one", file=out)
    if options.json:
        steps = [found._asdict() for found in verdicts]
        print(json.dumps({"steps": steps, "damaged": damaged, "config": config or None}))
    return FAILED if damaged or config else 0
