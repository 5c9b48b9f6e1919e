"""`jaxtrain bench`: measures against plain implementations, in one run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from jaxtrain.cli.shared import (
    JSON,
    MESH,
    add_mesh,
    add_settings,
    answer,
    mesh_of,
    progress,
    set_simulation_flags,
)
from jaxtrain.cluster.exit_codes import FAILED


def add_bench(commands: Any) -> None:
    text = "measure against the plain form, in turn in one run"
    bench = commands.add_parser("bench", help=text, description=text)
    kinds = bench.add_subparsers(required=True, metavar="WHAT")

    text = "the step of an experiment beside a plain jax and optax loop of the same model"
    step = kinds.add_parser("step", help=text, description=text)
    step.set_defaults(run=_bench_step)
    step.add_argument("experiment")
    add_mesh(step)
    step.add_argument("--steps", type=int, default=10)
    add_settings(step)

    text = "every collective by every algorithm beside lax's own"
    collectives = kinds.add_parser("collectives", help=text, description=text)
    collectives.set_defaults(run=_bench_collectives)
    collectives.add_argument("--mesh", required=True, help=MESH)
    for name, text in (
        ("collectives", "a,b or all; default all, across processes those of a training step"),
        ("algorithms", "a,b or all; default all, fewer across processes and beyond 16MiB"),
        ("sizes", "of the whole buffer on one device; default 4KiB,64KiB,1MiB,16MiB,64MiB"),
        ("processes", "how many share simulated devices; default 1,2,4, on accelerators 1"),
    ):
        collectives.add_argument(f"--{name}", metavar="A,B", help=text)
    for sub in (step, collectives):
        sub.add_argument("--simulate", action="store_true", help="run the mesh on fake CPU devices")

    text = (
        "a step of each of four pipeline schedules beside what its table predicts, on fake CPU "
        "devices; ten minutes on two cores"
    )
    pipeline = kinds.add_parser("pipeline", help=text, description=text)
    pipeline.set_defaults(run=_bench_pipeline)
    text = "2 or more, a fake device each, which share the machine's cores; default 2"
    pipeline.add_argument("--stages", type=int, default=2, metavar="N", help=text)
    text = "in each of which every program runs for two seconds; 2 or more, default 5"
    pipeline.add_argument("--rounds", type=int, metavar="N", help=text)
    text = "of the steps that are predicted and timed; default 2,32"
    pipeline.add_argument("--microbatches", metavar="A,B", help=text)

    text = "saves and restores beside plain Orbax and numpy.save, on fake CPU devices"
    checkpoint = kinds.add_parser("checkpoint", help=text, description=text)
    checkpoint.set_defaults(run=_bench_checkpoint)
    checkpoint.add_argument("--sizes", default="200MiB,1GiB", metavar="A,B", help="of the state")
    checkpoint.add_argument("--dir", help="where to write; default the system's temporary files")

    gpu = _add_gpu(kinds)
    for sub in (step, collectives, pipeline, checkpoint, gpu):
        sub.add_argument("--json", action="store_true", help=JSON)


def _add_gpu(kinds: Any) -> argparse.ArgumentParser:
    text = (
        "what one accelerator gives, in parts of up to five minutes: its pace, attention kernels, "
        "llama3_1b beside torch, what can be chosen of it, experts, a save; goes on with what "
        "--out lacks"
    )
    gpu = kinds.add_parser("gpu", help=text, description=text)
    gpu.set_defaults(run=_bench_gpu)
    text = "a directory for results.jsonl and table.md; default bench_gpu"
    gpu.add_argument("--out", default="bench_gpu", metavar="DIR", help=text)
    text = "these only, again if they are known: attention, or attention/cudnn"
    gpu.add_argument("--parts", metavar="A,B", help=text)
    text = "of one device that jaxtrain does not know by its name: a mesh file with a table [chip]"
    gpu.add_argument("--mesh", metavar="FILE", help=text)
    text = "every part on a CPU, at sizes that mean nothing"
    gpu.add_argument("--dry-run", action="store_true", help=text)
    return gpu


def _bench_gpu(options: argparse.Namespace) -> int:
    from jaxtrain.bench_gpu.runner import bench_gpu

    parts = options.parts and [name.strip() for name in options.parts.split(",")]
    mesh, dry = options.mesh, options.dry_run
    report = bench_gpu(options.out, parts=parts, mesh=mesh, dry_run=dry, progress=progress(options))
    return answer(options, report, report.table())


def _bench_step(options: argparse.Namespace) -> int:
    from jaxtrain.bench.step import bench_step

    spec, settings = mesh_of(options), options.settings
    report = bench_step(options.experiment, spec, steps=options.steps, settings=settings)
    return answer(options, report, report.table())


def _bench_collectives(options: argparse.Namespace) -> int:
    from jaxtrain.bench import collectives as bench

    readers: dict[str, tuple[Callable[[str], Any], tuple[str, ...]]] = {
        "collectives": (str.strip, bench.MEASURED),
        "algorithms": (str.strip, bench.OURS),
        "sizes": (bench.read_size, ()),
        "processes": (bench.read_count, ()),
    }
    chosen: dict[str, Any] = {}
    for name, (read, everything) in readers.items():
        text = getattr(options, name)
        if text is not None:
            is_all = text == "all" and everything
            chosen[name] = everything if is_all else [read(word) for word in text.split(",")]
    try:
        report = bench.bench_collectives(mesh_of(options), **chosen, progress=progress(options))
    except RuntimeError as error:  # the process's message says more than our traceback
        print(f"jaxtrain: {error}", file=sys.stderr)
        return FAILED
    return answer(options, report, report.summary())


def _bench_pipeline(options: argparse.Namespace) -> int:
    from jaxtrain.mesh.mesh import mesh_from_axes

    # A count below 1 makes no mesh; `bench_pipeline` refuses it.
    set_simulation_flags(options, mesh_from_axes(stage=max(options.stages, 1)))
    from jaxtrain.bench.pipeline import bench_pipeline

    chosen: dict[str, Any] = {}
    if options.rounds is not None:
        chosen["rounds"] = options.rounds
    if options.microbatches is not None:
        words = [word.strip() for word in options.microbatches.split(",")]
        if not all(word.isdecimal() for word in words):
            raise ValueError(
                f"--microbatches {options.microbatches!r}: write whole numbers, such as 2,32"
            )
        chosen["microbatches"] = tuple(map(int, words))
    report = bench_pipeline(options.stages, **chosen, progress=progress(options))
    return answer(options, report, report.table())


def _bench_checkpoint(options: argparse.Namespace) -> int:
    from jaxtrain.mesh.mesh import mesh_from_axes

    set_simulation_flags(options, mesh_from_axes(fsdp=8))
    from jaxtrain.bench.checkpoint import bench_checkpoint
    from jaxtrain.bench.collectives import read_size

    sizes = tuple(read_size(text) for text in options.sizes.split(","))
    report = bench_checkpoint(sizes, directory=options.dir, progress=progress(options))
    return answer(options, report, report.table())
