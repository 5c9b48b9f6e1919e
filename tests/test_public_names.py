"""What an editor and an interpreter see of `jaxtrain`: the public names, typed."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from house import undescribed_fields

import jaxtrain

ROOT = Path(__file__).parents[1]
WITH_STUBS = (
    *(
        "attention",
        "collectives",
        "compression",
        "context",
        "hopper",
        "inspection",
        "losses",
        "mesh",
        "models",
    ),
    *("moe", "nn", "operations", "optim", "quantization", "scores", "tasks", "transformer"),
)
"""Rooms whose public names are handed out by a stub, as the top's are."""


def public(room: str) -> list[str]:
    return list(importlib.import_module(f"jaxtrain.{room}").__all__)


RIGHT = """\
import jaxtrain
from jaxtrain import AdamW, DecoderConfig, Experiment

result: jaxtrain.Result = jaxtrain.train("experiment.py", "mesh.toml", steps=3)
losses: list[float] = [line["loss"] for line in result.history]
optimizer: AdamW = AdamW(3e-4, weight_decay=0.0)
"""
WRONG = {
    "from jaxtrain import Adamw": "missing-module-attribute",
    "AdamW(learning_rat=3)": "unexpected-keyword",
    "Experiment(modle=1)": "unexpected-keyword",
    'jaxtrain.train("a.py", "b.toml", stepz=3)': "unexpected-keyword",
    "DecoderConfig(vocab=8, embed=4, layer=2)": "unexpected-keyword",
    'AdamW("3e-4")': "bad-argument-type",
}


def type_errors(directory: Path, text: str) -> dict[str, set[str]]:
    """Line -> kinds of errors, as the type checker of an editor shows them of a script outside the
    checkout: it has jaxtrain as README's commands install it."""
    script = directory / "script.py"
    script.write_text(text, encoding="utf-8")
    (directory / "pyrefly.toml").write_text('project-includes = ["script.py"]\n', encoding="utf-8")
    command = (Path(sys.executable).parent / "pyrefly", "check", "--output-format=json")
    ran = subprocess.run(
        [*command, f"--python-interpreter-path={sys.executable}"],
        cwd=directory, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: dict[str, set[str]] = {}
    for error in json.loads(ran.stdout)["errors"]:
        line = text.splitlines()[error["line"] - 1]
        found.setdefault(line, set()).add(error["name"])
    return found


def test_a_type_checker_sees_wrong_names_and_fields_and_no_other(tmp_path: Path) -> None:
    found = type_errors(tmp_path, RIGHT + "\n".join(WRONG))
    assert set(found) == set(WRONG)
    for line, kind in WRONG.items():
        assert kind in found[line]


def test_types_are_for_those_who_install_it() -> None:
    """PEP 561: without py.typed a type checker believes nothing of an installed package; the stub
    is read when it is imported; meshes go by their names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    data, package = project["tool"]["setuptools"]["package-data"], ROOT / "jaxtrain"
    shipped = {path for pattern in data["jaxtrain"] for path in package.glob(pattern)}
    meshes = {package / "meshes" / path.name for path in (ROOT / "meshes").glob("*.toml")}
    assert len(meshes) > 10
    assert shipped == {package / "py.typed", *meshes}
    assert data["*"] == ["*.pyi"] and len([*package.rglob("__init__.pyi")]) == 1 + len(WITH_STUBS)


def test_the_top_has_what_a_script_begins_with() -> None:
    """About sixty names; the others are in rooms that are named there too."""
    rooms = {name for name in jaxtrain.__all__ if inspect.ismodule(getattr(jaxtrain, name))}
    assert rooms == {*WITH_STUBS, "checkpoint", "data"}
    assert len(jaxtrain.__all__) - len(rooms) <= 59
    assert {"bf16", "fp8", "fp16", "fp32", "int8"} <= set(jaxtrain.__all__)


def test_help_on_an_experiment_is_read_at_a_glance() -> None:
    """Defaults are as somebody would write them, each field has a line, and Raises is last."""
    signature = str(inspect.signature(jaxtrain.Experiment))
    assert len(signature) < 800 and "= fp32" in signature and "= fsdp() | tensor()" in signature
    lines = inspect.getdoc(jaxtrain.Experiment).splitlines()
    for field in dataclasses.fields(jaxtrain.Experiment):
        assert sum(line.startswith(f"{field.name}: ") for line in lines) == 1, field.name
    begins = [line for line in lines if line and not line.startswith(" ")]
    assert begins[-2].startswith("Raises ValueError") and len(begins) == 1 + 16 + 2


def test_what_is_shown_makes_the_same_value_again() -> None:
    """Of presets their names, of others the fields that are not the default."""
    names = {name: getattr(jaxtrain, name) for name in jaxtrain.__all__}
    names |= {name: getattr(jaxtrain.checkpoint, name) for name in ("Minutes", "Keep", "Best")}
    own = jaxtrain.Execution(mode="gspmd", small_leaf=3)
    assert repr(own) == "Execution(mode='gspmd', small_leaf=3)"
    for value in (
        own,
        jaxtrain.Execution(),
        *(jaxtrain.fp32, jaxtrain.bf16, jaxtrain.fp16, jaxtrain.fp8, jaxtrain.int8),
        *(jaxtrain.fsdp(), jaxtrain.data_parallel(), jaxtrain.zero1(), jaxtrain.zero2()),
        jaxtrain.zero2() | jaxtrain.tensor(),
        jaxtrain.SavePolicy(every=jaxtrain.checkpoint.Minutes(3.0), keep=9),
        jaxtrain.Pipeline(chunks=2),
        jaxtrain.Health(replay=7),
        jaxtrain.Evaluation(every=3),
        jaxtrain.Logging(every=4),
    ):
        assert eval(repr(value), names) == value, value
    other = dataclasses.replace(jaxtrain.bf16, matmul="high")
    assert repr(other) == "Precision(compute=<class 'jax.numpy.bfloat16'>, matmul='high')"


@pytest.mark.parametrize(
    ("room", "name"),
    [("jaxtrain", name) for name in jaxtrain.__all__]
    + [(f"jaxtrain.{room}", name) for room in WITH_STUBS for name in public(room)],
)
def test_every_public_name_is_there_and_described(room: str, name: str) -> None:
    value = getattr(importlib.import_module(room), name)
    if room == "jaxtrain" and inspect.ismodule(value):
        return
    assert not inspect.ismodule(value)
    said = inspect.getdoc(value)
    assert said and not said.startswith(f"{name}("), "a dataclass without one shows its fields"


def test_every_field_of_a_public_class_is_described(tmp_path: Path) -> None:
    assert undescribed_fields(ROOT / "jaxtrain") == []
    (tmp_path / "__init__.pyi").write_text("from .a import A as A\n", encoding="utf-8")
    (tmp_path / "a.py").write_text(
        'class B:\n    "named: one."\n    named: int\n    below: int\n    "Two."\n    low: int\n'
        "class A(B):\n    other: int = 0\n    name: int = 0\n",
        encoding="utf-8",
    )
    assert undescribed_fields(tmp_path) == ["A.other", "A.name", "A.low"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Lamb", "no Lamb; it is jaxtrain.optim.Lamb"),
        ("Keep", "it is jaxtrain.checkpoint.Keep"),
        ("TokenFiles", "it is jaxtrain.data.TokenFiles"),
        ("Calback", "did you mean Callback"),
        ("zzz", "no zzz$"),
    ],
)
def test_a_name_that_is_not_at_the_top_is_told_where_it_is(name: str, said: str) -> None:
    with pytest.raises(AttributeError, match=said):
        getattr(jaxtrain, name)


def test_functions_stay_functions_whatever_was_imported() -> None:
    script = (
        "import inspect, jaxtrain.run.loop, jaxtrain.certificate.certify, jaxtrain.session.check\n"
        "import jaxtrain.drills.drill, jaxtrain.contract.compile, jaxtrain.machines.elastic\n"
        "import jaxtrain.pipeline.picture, jaxtrain.optim.schedule\n"
        "import jaxtrain\n"
        "names = 'train certify check generate export verify compile schedule elastic drill'\n"
        "assert all(inspect.isfunction(getattr(jaxtrain, name)) for name in names.split())\n"
        "assert 'run_dir' in inspect.signature(jaxtrain.train).parameters\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=6000)


def test_importing_it_does_not_start_jax() -> None:
    script = "import jaxtrain, sys; assert dir(jaxtrain); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=600)
