"""The layers and budgets of the house, read from the source with `ast`: nothing is imported.

The checker returns `file:line: what is wrong`; its own tests feed it bad files.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "jaxtrain"

LAYERS = {
    "arrays": 0,
    "backends": 0,
    "notices": 0,
    "overlap": 0,
    "program": 0,
    "public": 0,
    "remedies": 0,
    "reprs": 0,
    "violations": 0,
    "files": 1,
    "cluster": 2,
    "mesh": 2,
    "scores": 2,
    "state_format": 2,
    "telemetry": 2,
    "tokenizers": 2,
    "checkpoint": 3,
    "sources": 3,
    "collectives": 3,
    "data": 4,
    "attention": 4,
    "quantization": 4,
    "context": 5,
    "hopper": 5,
    "moe": 5,
    "nn": 5,
    "optim": 5,
    "losses": 6,
    "operations": 7,
    "pipeline": 7,
    "compression": 8,
    "models": 8,
    "tasks": 9,
    "transformer": 9,
    "experiment": 10,
    "families": 10,
    "huggingface": 11,
    "validation": 11,
    "step": 12,
    "planner": 13,
    "scoring": 13,
    "weights": 13,
    "session": 14,
    "bench": 15,
    "certificate": 15,
    "contract": 15,
    "health": 15,
    "inspection": 15,
    "machines": 15,
    "bench_gpu": 16,
    "run": 16,
    "fault_tolerance": 17,
    "drills": 18,
    "cli": 19,
    "__main__": 20,
}
"""Package or module of jaxtrain -> layer. `jaxtrain/__init__.py` re-exports, and is free."""

FORBIDDEN_NAMES = {"utils", "util", "common", "core", "helpers", "helper", "misc"}
ROOM_LINES, FILE_LINES, FUNCTION_LINES, DATACLASS_FIELDS = 2500, 400, 60, 16

TRACER_FREE = (
    *(
        "telemetry/flops.py",
        "data/",
        "tokenizers/",
        "mesh/hardware.py",
        "mesh/axes.py",
        "violations.py",
    ),
    *("mesh/roles.py", "models/__init__.py", "models/description.py", "operations/"),
    *("planner/__init__.py", "planner/facts.py", "planner/sent.py", "planner/traffic.py"),
    *("planner/optimizer_traffic.py", "planner/weight_traffic.py", "planner/token_traffic.py"),
    *("planner/context_traffic.py", "planner/expert_traffic.py", "planner/backward_work.py"),
    *("planner/pipeline_traffic.py", "planner/pipeline_work.py"),
    *("moe/__init__.py", "moe/room.py"),
    *("collectives/__init__.py", "collectives/cost/__init__.py", "collectives/cost/steps.py"),
)
"""Files that must not import JAX when they are imported (the start of a process waits for it)."""


KNOW_FAMILIES = (
    *("models/", "transformer/", "families/", "huggingface/", "bench/", "bench_gpu/"),
    *("experiment/vocabulary.py", "experiment/stored.py"),  # what a config.json may name, or named
    "__init__.py",
)
OF_ANY_MODEL = ("jaxtrain.transformer.small", "jaxtrain.transformer.essence")
"""Modules whose functions take any model."""
LEAVES = ("period.", "prefix.", "suffix.", "attention.", "mlp.")
"""Beginnings of the names of a decoder's leaves."""


def modules(root: Path) -> Iterator[tuple[str, ast.Module, str]]:
    """(path below root, tree, text) of every Python file."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        yield path.relative_to(root).as_posix(), _parsed(text), text


@cache
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


def imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported, at whatever depth: in functions and
    under TYPE_CHECKING too. `package` holds the names of the file's package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join((*base, *(node.module or "").split("."))).strip(".")
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            called = node.func.id if isinstance(node.func, ast.Name) else called
            first = node.args[0]
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def layer_violations(root: Path) -> list[str]:
    """Imports that go sideways or up, and files in no layer."""
    found = []
    for path, tree, _ in modules(root):
        parts = Path(path).with_suffix("").parts
        room = parts[0]
        if path == "__init__.py":
            continue
        if room not in LAYERS:
            found.append(f"{path}:1: {room} is in no layer; add it to LAYERS and to the plan")
            continue
        for line, name in imports(tree, ("jaxtrain", *parts[:-1])):
            words = name.split(".")
            if words[0] != "jaxtrain" or len(words) < 2 or words[1] == room:
                continue
            if words[1] in LAYERS and LAYERS[words[1]] >= LAYERS[room]:
                found.append(
                    f"{path}:{line}: {room} (layer {LAYERS[room]}) imports {words[1]} "
                    f"(layer {LAYERS[words[1]]})"
                )
            if words[1] not in LAYERS:
                found.append(f"{path}:{line}: {name} is imported through jaxtrain itself")
    return found


def cycle_violations(root: Path) -> list[str]:
    """The first ring of modules that import each other, in whatever way."""
    trees = {_dotted(path): (path, tree) for path, tree, _ in modules(root)}
    needs: dict[str, dict[str, int]] = {name: {} for name in trees}
    for name, (path, tree) in trees.items():
        for line, found in imports(tree, ("jaxtrain", *Path(path).parts[:-1])):
            module = found if found in trees else found.rpartition(".")[0]
            if module in trees and module != name:
                needs[name][module] = line
    sorter = TopologicalSorter({name: needs[name].keys() for name in needs})
    try:
        sorter.prepare()
    except CycleError as error:
        ring = error.args[1][::-1]  # each is imported by the one before it
        path, line = trees[ring[0]][0], needs[ring[0]][ring[1]]
        return [f"{path}:{line}: {' imports '.join(ring)}"]
    return []


def folder_violations(root: Path) -> list[str]:
    """Folders that import their sub-folder and are imported by it."""
    edges: dict[tuple[str, str], str] = {}
    trees = {_dotted(path): path for path, _, _ in modules(root)}
    for path, tree, _ in modules(root):
        here = Path(path).parent.as_posix()
        for line, found in imports(tree, ("jaxtrain", *Path(path).parts[:-1])):
            module = found if found in trees else found.rpartition(".")[0]
            if module in trees:
                there = Path(trees[module]).parent.as_posix()
                edges.setdefault((here, there), f"{path}:{line}")
    return [
        f"{place}: {here} imports {there}, which imports it ({edges[there, here]})"
        for (here, there), place in edges.items()
        if here != "." and there.startswith(f"{here}/") and (there, here) in edges
    ]


def _dotted(path: str) -> str:
    return ".".join(("jaxtrain", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


def budget_violations(root: Path) -> list[str]:
    """Rooms (packages with their sub-folders), files, functions and dataclasses over their limits,
    and names that say nothing."""
    found = []
    rooms: Counter[str] = Counter()
    for path, tree, text in modules(root):
        lines = len(text.splitlines())
        room, _, name = path.rpartition("/")
        room = room.partition("/")[0]
        if rooms[room] <= ROOM_LINES < rooms[room] + lines:
            found.append(f"{path}:1: with {name} {room} has over {ROOM_LINES} lines: make it two")
        rooms[room] += lines
        if lines > FILE_LINES:
            found.append(f"{path}:{FILE_LINES + 1}: {lines} lines, at most {FILE_LINES}")
        bad = FORBIDDEN_NAMES & set(Path(path).with_suffix("").parts)
        if bad:
            found.append(f"{path}:1: {', '.join(bad)} says nothing of what is inside")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    found.append(f"{path}:{node.lineno}: {node.name} has {length} lines")
            if isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.unparse(d) for d in node.decorator_list
            ):
                fields = sum(isinstance(item, ast.AnnAssign) for item in node.body)
                if fields > DATACLASS_FIELDS:
                    found.append(f"{path}:{node.lineno}: {node.name} has {fields} fields")
    return found


def partition_spec_violations(root: Path) -> list[str]:
    """Uses of PartitionSpec (or jax.P) outside mesh/sharding.py."""
    found = []
    for path, tree, _ in modules(root):
        if path == "mesh/sharding.py":
            continue
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            names += [node.id] if isinstance(node, ast.Name) else []
            jax_p = (
                isinstance(node, ast.ImportFrom)
                and node.module in ("jax", "jax.sharding")
                and "P" in names
            )
            jax_p |= isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "jax.P",
                "jax.sharding.P",
            )
            if jax_p or "PartitionSpec" in names:
                found.append(f"{path}:{node.lineno}: only mesh/sharding.py writes a PartitionSpec")
    return found


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: not inside functions or TYPE_CHECKING."""
    queue: list[ast.AST] = [tree]
    while queue:
        node = queue.pop()
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            queue += node.orelse
            continue
        queue += ast.iter_child_nodes(node)


def tracer_violations(root: Path) -> list[str]:
    found = []
    for path, tree, _ in modules(root):
        if not path.startswith(TRACER_FREE):
            continue
        for node in at_import(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            heavy = {name.split(".")[0] for name in names} & {"jax", "jaxlib", "flax", "optax"}
            if heavy:
                found.append(f"{path}:{node.lineno}: imports {', '.join(heavy)} at once")
    return found


def family_violations(root: Path) -> list[str]:
    """Files that know one family of models, or where in a model a leaf is: the rest of the house
    reads a model's description (design.md, D11)."""
    found = []
    for path, tree, _ in modules(root):
        if path.startswith(KNOW_FAMILIES):
            continue
        package = ("jaxtrain", *path.split("/")[:-1])
        for line, name in imports(tree, package):
            if name.startswith("jaxtrain.transformer") and not name.startswith(OF_ANY_MODEL):
                found.append(f"{path}:{line}: imports {name}, which is one family's")
        said = {id(each.value) for each in ast.walk(tree) if isinstance(each, ast.Expr)}
        texts = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        found += [
            f"{path}:{node.lineno}: {node.value!r} is a leaf of one family's"
            for node in texts
            if id(node) not in said and str(node.value).startswith(LEAVES)
        ]
    return found


CHECKS = {
    "families": family_violations,
    "layers": layer_violations,
    "cycles": cycle_violations,
    "budgets": budget_violations,
    "folders": folder_violations,
    "partition_spec": partition_spec_violations,
    "tracer_free": tracer_violations,
}


@pytest.mark.parametrize("check", CHECKS)
def test_the_house_keeps_its_plan(check):
    assert len(list(modules(ROOT))) > 40, f"{ROOT} is not the package"
    found = CHECKS[check](ROOT)
    assert not found, "\n".join(found)


def test_every_package_says_what_it_is_for():
    for package in (p for p in ROOT.iterdir() if p.is_dir() and p.name in LAYERS):
        tree = ast.parse((package / "__init__.py").read_text(encoding="utf-8"))
        assert len(ast.get_docstring(tree) or "") > 80, f"{package.name}/__init__.py"


def test_a_class_has_a_name_of_its_own():
    places: dict[str, list[str]] = {}
    for path, tree, _ in modules(ROOT):
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_an_alias_has_one_meaning():
    """Of types, and none that a class has; type variables aside, which are a module's own."""
    places: dict[str, list[str]] = {}
    classes = set()
    for path, tree, _ in modules(ROOT):
        classes |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        for node in tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else None
            if not isinstance(target, ast.Name) or isinstance(node.value, ast.Call):
                continue
            if target.id[0].isupper() and not target.id.isupper():
                places.setdefault(target.id, []).append(path)
    assert len(places) > 100, "aliases are found"
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
    assert classes & places.keys() == set()


BAD = [
    (
        "layers",
        "mesh/a.py",
        "import os\nfrom jaxtrain.losses.cross_entropy import x\n",
        "a.py:2: mesh (layer 2)",
    ),
    (
        "layers",
        "tokenizers/a.py",
        "import jaxtrain.telemetry.flops\n",
        "a.py:1: tokenizers (layer 2) imports tele",
    ),
    (
        "layers",
        "nn/a.py",
        "def f():\n    from jaxtrain.models import block\n",
        "a.py:2: nn (layer 5)",
    ),
    ("layers", "nn/a.py", "from ..run import loop\n", "a.py:1: nn (layer 5) imports run"),
    ("layers", "nn/a.py", "from .. import optim\n", "a.py:1: nn (layer 5) imports optim"),
    ("layers", "nn/a.py", "from jaxtrain import cli\n", "a.py:1: nn (layer 5) imports cli"),
    (
        "layers",
        "nn/a.py",
        "import importlib\nimportlib.import_module('jaxtrain.cli')\n",
        "a.py:2: nn",
    ),
    (
        "layers",
        "optim/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from jaxtrain.run import x\n",
        "a.py:3: optim (layer 5) imports run (layer 16)",
    ),
    ("layers", "run/a.py", "from jaxtrain import fsdp\n", "a.py:1: jaxtrain.fsdp is imported"),
    ("layers", "experiment.py", "from jaxtrain.run import x\n", "experiment.py:1: experiment"),
    ("layers", "shed/a.py", "", "shed/a.py:1: shed is in no layer"),
    ("budgets", "nn/a.py", "x = 1\n" * 401, "a.py:401: 401 lines"),
    ("budgets", "nn/a.py", "def f():\n" + "    x = 1\n" * 60, "a.py:1: f has 61 lines"),
    (
        "budgets",
        "nn/a.py",
        "@dataclass(frozen=True)\nclass C:\n" + "".join(f"    a{i}: int\n" for i in range(17)),
        "a.py:2: C has 17 fields",
    ),
    ("budgets", "nn/utils.py", "", "utils.py:1: utils says nothing"),
    ("budgets", "core/a.py", "", "a.py:1: core says nothing"),
    (
        "families",
        "step/a.py",
        "from jaxtrain.transformer.decoder import D\n",
        "a.py:1: imports jaxtrain",
    ),
    ("families", "planner/a.py", "x = f('prefix.', '.')\n", "a.py:1: 'prefix.' is a leaf"),
    ("partition_spec", "nn/a.py", "from jax.sharding import PartitionSpec as S\n", "a.py:1: only"),
    ("partition_spec", "nn/a.py", "import jax\nx = jax.sharding.PartitionSpec()\n", "a.py:2: only"),
    ("partition_spec", "nn/a.py", "import jax\nx = jax.P('data')\n", "a.py:2: only"),
    ("partition_spec", "nn/a.py", "from jax import P\n", "a.py:1: only"),
    ("tracer_free", "data/a.py", "import jax.numpy as jnp\n", "a.py:1: imports jax"),
    ("tracer_free", "telemetry/flops.py", "from jax import lax\n", "flops.py:1: imports jax"),
]


@pytest.mark.parametrize(("check", "path", "text", "said"), BAD)
def test_the_checker_sees_a_bad_file(tmp_path, check, path, text, said):
    (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / path).write_text(text, encoding="utf-8")
    found = CHECKS[check](tmp_path)
    assert len(found) == 1 and said in found[0], found


GOOD = [
    ("layers", "__init__.py", "from jaxtrain.cli import main\n"),
    (
        "layers",
        "run/a.py",
        "from jaxtrain.step.state import x\nfrom jaxtrain.nn import loss\n",
    ),
    ("layers", "cli.py", "from jaxtrain.run import loop\nimport jax\n"),
    ("layers", "nn/a.py", "from . import loss\nfrom .loss import logits\n"),
    ("budgets", "nn/a.py", "x = 1\n" * 400),
    ("budgets", "nn/a.py", "class C:\n" + "".join(f"    a{i}: int\n" for i in range(17))),
    ("families", "models/a.py", "from jaxtrain.transformer.decoder import D\nx = 'prefix.'\n"),
    ("families", "step/a.py", "def f():\n    'prefix. as a docstring'\n"),
    ("partition_spec", "mesh/sharding.py", "from jax.sharding import PartitionSpec\n"),
    ("partition_spec", "nn/a.py", "def partition_spec(P):\n    return P\n"),
    ("tracer_free", "data/a.py", "def f():\n    import jax\n"),
    (
        "tracer_free",
        "data/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\n",
    ),
]


@pytest.mark.parametrize(("check", "path", "text"), GOOD)
def test_the_checker_lets_a_good_file_pass(tmp_path, check, path, text):
    (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
    (tmp_path / path).write_text(text, encoding="utf-8")
    assert CHECKS[check](tmp_path) == []


def test_the_checker_sees_a_room_that_should_be_two(tmp_path):
    (tmp_path / "nn" / "inner").mkdir(parents=True)
    for path, lines in (("a", 390), ("b", 390), ("inner/c", 390)):
        (tmp_path / f"nn/{path}.py").write_text("x = 1\n" * lines, encoding="utf-8")
    for each in range(3):
        (tmp_path / f"nn/d{each}.py").write_text("x = 1\n" * 390, encoding="utf-8")
    assert CHECKS["budgets"](tmp_path) == []  # 2,340 lines, with the folder within
    (tmp_path / "nn/inner/e.py").write_text("x = 1\n" * 161, encoding="utf-8")
    assert CHECKS["budgets"](tmp_path) == [
        "nn/inner/e.py:1: with e.py nn has over 2500 lines: make it two"
    ]


def test_the_checker_sees_a_folder_that_imports_both_ways(tmp_path):
    files = {
        "nn/a.py": "from jaxtrain.nn.inner.b import x\n",
        "nn/inner/b.py": "x = 1\n",
        "nn/inner/c.py": "y = 1\n",
        "nn/d.py": "",
    }

    def told(**texts):
        for path, text in {**files, **{f"nn/{k}.py": v for k, v in texts.items()}}.items():
            (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / path).write_text(text, encoding="utf-8")
        return CHECKS["folders"](tmp_path)

    assert told() == []
    (line,) = told(**{"inner/c": "def f():\n    from .. import d\n"})
    assert line == "nn/a.py:1: nn imports nn/inner, which imports it (nn/inner/c.py:2)"


CIRCLES = [
    {"nn/a.py": "from jaxtrain.nn.b import x\n", "nn/b.py": "import jaxtrain.nn.a\n"},
    {"nn/a.py": "from jaxtrain.nn import b\n", "nn/b.py": "def f():\n    from .a import x\n"},
    {"nn/__init__.py": "from jaxtrain.nn.a import x\n", "nn/a.py": "from jaxtrain.nn import y\n"},
    {
        "nn/a.py": "from jaxtrain.nn.b import x\n",
        "nn/b.py": "from jaxtrain.nn.c import x\n",
        "nn/c.py": "if TYPE_CHECKING:\n    from jaxtrain.nn.a import x\n",
    },
]


@pytest.mark.parametrize("files", CIRCLES)
def test_the_checker_sees_a_circle(tmp_path, files):
    for path, text in {**files, "mesh/a.py": "from jaxtrain.nn.a import x\n"}.items():
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    (told,) = cycle_violations(tmp_path)
    where, ring = told.split(": ")
    assert where.split(":")[0] in files and int(where.split(":")[1]) > 0
    names = ring.split(" imports ")
    assert names[0] == names[-1] and len(names) == len(files) + 1
