"""`jaxtrain new`: an experiment file and a mesh file to begin with."""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from jaxtrain.mesh.axes import TABLE
from jaxtrain.violations import raise_violations

EXPERIMENT = '''"""A byte-level language model of the Python standard library.

jaxtrain train NAME.py --mesh NAME.toml
"""

from jaxtrain import (
    AdamW,
    AttentionConfig,
    BlockConfig,
    DecoderConfig,
    Evaluation,
    Experiment,
    MlpConfig,
    Sample,
    TextData,
    WarmupCosine,
)
from jaxtrain.data import ByteTokenizer, StdlibSource


def experiment() -> Experiment:
    block = BlockConfig(AttentionConfig(heads=4), MlpConfig(hidden=256))
    return Experiment(
        model=DecoderConfig(vocab=257, embed=128, layers=4, period=(block,), tied=True),
        # Text of your own: TextFiles("books/**/*.txt") of jaxtrain.data in StdlibSource's place.
        data=TextData(StdlibSource(), ByteTokenizer(), seq=256),
        optimizer=AdamW(WarmupCosine(4e-3, warmup=20), weight_decay=0.1),
        steps=100,
        batch=16,
        evaluation=Evaluation(every=50, batches=8, sample=Sample("def ", tokens=100)),
    )
'''
AXES = "".join(f"#   {row.name:<8} {row.meaning}\n" for row in TABLE)
MESH = f"""\
# Eight simulated devices on this machine's CPU. Meshes of GPUs and TPUs, such as h100_8 and v5p_16,
# come with jaxtrain: pass the name as --mesh. The sizes of these axes multiply to the devices; what
# each axis splits:
{AXES}\
chip = "cpu"
devices = 8

[axes]
fsdp = 8

[links]
host = "memory"
"""


def add_options(new: argparse.ArgumentParser) -> None:
    new.add_argument("name", metavar="NAME", help="of the files NAME.py and NAME.toml")


def new_command(options: argparse.Namespace) -> int:
    """Writes the two files, and prints the commands that take them. Never writes over a file."""
    path = Path(options.name)
    experiment, mesh = (path.parent / (path.name + end) for end in (".py", ".toml"))
    violations = [
        f"{file} exists; give another name"
        for file in (experiment, mesh)
        if os.path.lexists(file)  # a link that leads nowhere, too
    ]
    if not path.name.isidentifier():
        violations.append(f"NAME={path.name!r} must be letters, digits and _; use for example mine")
    if not path.parent.is_dir():
        violations.append(f"{path.parent} is not a directory; make it first")
    raise_violations(violations, f"{options.name} cannot be written")
    for file, text in ((experiment, EXPERIMENT.replace("NAME", path.name)), (mesh, MESH)):
        with file.open("x", encoding="utf-8") as opened:
            opened.write(text)
    for verb in ("check", "train"):
        print(shlex.join(["jaxtrain", verb, str(experiment), "--mesh", str(mesh)]))
    return 0
