"""`jaxtrain schedule`: draws a pipeline schedule, with its cost and memory."""

from __future__ import annotations

import argparse
import json

from jaxtrain.cli.shared import JSON, text_stream
from jaxtrain.files.stores import local_path


def add_options(schedule: argparse.ArgumentParser) -> None:
    source = schedule.add_mutually_exclusive_group(required=True)
    source.add_argument("--kind", help="gpipe, one_f_one_b, interleaved or zero_bubble")
    source.add_argument("--table", metavar="FILE", help="a table of your own, as --save writes it")
    schedule.add_argument("--stages", type=int, help="pipeline stages, with --kind")
    schedule.add_argument("--microbatches", type=int, help="microbatches of a step, with --kind")
    schedule.add_argument("--chunks", type=int, help="of blocks on each stage; default 1")
    for name, text in (("forward", "F"), ("backward", "B"), ("weight", "W"), ("head", "the head")):
        help_ = (
            f"cost of {text} on one microbatch, in any unit; default {0 if name == 'head' else 1}"
        )
        schedule.add_argument(f"--{name}", type=float, metavar="TIME", help=help_)
    schedule.add_argument("--svg", metavar="FILE", help="write a Gantt chart there")
    schedule.add_argument("--save", metavar="FILE", help="write the table there")
    schedule.add_argument("--json", action="store_true", help=JSON)


def draw(options: argparse.Namespace) -> int:
    from rich.console import Console

    from jaxtrain.pipeline.picture import DrawnSchedule
    from jaxtrain.pipeline.schedule import Costs, make_schedule
    from jaxtrain.pipeline.table_file import read_schedule, written

    svg_file, table_file = (
        local_path(f"--{name}", path) if (path := getattr(options, name)) else None
        for name in ("svg", "save")
    )
    sizes = {name: getattr(options, name) for name in ("stages", "microbatches", "chunks")}
    given_sizes = {name: size for name, size in sizes.items() if size is not None}
    if options.table:
        if given_sizes:
            raise ValueError(f"--table has its own sizes; leave out --{', --'.join(given_sizes)}")
        schedule = read_schedule(options.table)
    else:
        if missing := sorted({"stages", "microbatches"} - set(given_sizes)):
            raise ValueError(f"--kind needs --{' and --'.join(missing)}")
        schedule = make_schedule(options.kind, **given_sizes)
    times = {name: getattr(options, name) for name in ("forward", "backward", "weight", "head")}
    costs = Costs(**{name: time for name, time in times.items() if time is not None})
    drawn = DrawnSchedule(schedule, costs)
    try:
        picture = None if svg_file is None else drawn.svg()
    except ValueError as error:
        raise ValueError(f"--svg: {error}") from error
    drawn.print_to(Console(file=text_stream(options)))
    if svg_file is not None and picture is not None:
        svg_file.write_text(picture, encoding="utf-8")
    if table_file is not None:
        table_file.write_text(written(schedule), encoding="utf-8")
    if options.json:
        print(json.dumps(drawn.as_json()))
    return 0
