"""Commands, tables, links and excerpts of README and docs/ are those of the tree; versions fit."""

from __future__ import annotations

import ast
import inspect
import os
import platform
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import jaxtrain
from jaxtrain import operations
from jaxtrain.cli import main

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
TEXT = "\n".join([README, *PAGES.values()])
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def blocks(language: str, text: str = TEXT) -> list[str]:
    """The bodies of the fenced blocks of a language, or "" of none."""
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [body for found, body in fenced if found == language]


SET_UP = [block.strip() for block in blocks("bash") if "-m venv" in block]
JAXTRAIN = [
    line[line.index("jaxtrain ") :]
    for block in blocks("bash")
    for line in block.splitlines()
    if "jaxtrain " in line
]


def table(header: str) -> list[str]:
    """The first cells of the table whose header begins with `header`."""
    rows = TEXT.split(f"| {header} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [row.split("|")[1].strip() for row in rows]


def help_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_two_commands_do_all_the_set_up() -> None:
    assert len(SET_UP) == 2
    assert all("\n" not in command for command in SET_UP)
    assert "jaxtrain train" in SET_UP[0] and SET_UP[1].endswith("/pytest -n 2")


@pytest.mark.parametrize("command", SET_UP, ids=["train", "test"])
def test_ci_runs_what_readme_says(command: str) -> None:
    assert command in CI


@pytest.mark.parametrize("script", [*SET_UP, CI], ids=["train", "test", "ci"])
def test_shell_parses(script: str) -> None:
    assert subprocess.run(["bash", "-n", "-c", script], capture_output=True).returncode == 0


def test_paths_in_ci_exist() -> None:
    named = re.findall(r"(?:tests|experiments|meshes)/[\w/.]+", CI)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_command_table_is_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of([], capsys)
    commands = re.findall(r"^    (\w+) ", shown, re.MULTILINE)
    named = [re.match(r"`jaxtrain (\w+)", cell).group(1) for cell in table("Command")]  # type: ignore[union-attr]
    assert sorted(set(named)) == sorted(commands)


@pytest.mark.parametrize("line", [*JAXTRAIN, *(c.strip("`") for c in table("Command"))])
def test_command_lines_use_options_that_exist(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line)[1:]
    if "--" in words:  # another command, of each process
        inner = words[words.index("--") + 1 :]
        words = words[: -len(inner) - 1]
        if "..." not in inner:
            test_command_lines_use_options_that_exist(shlex.join(["jaxtrain", *inner]), capsys)
    commands = 2 if words[0] == "bench" else 1
    shown = help_of(words[:commands], capsys)
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"{option}\b", shown), f"{option} of: {line}"
    assert [w for w in words if w.endswith((".py", ".toml")) and not (ROOT / w).exists()] == []
    for option, mesh in pairwise(words):
        assert option != "--mesh" or mesh == "M" or jaxtrain.load_mesh(mesh)


def test_runs_of_the_examples_do_not_meet() -> None:
    """Each trains in a directory of its own, and what is read of a run was written above it."""
    written: list[str] = []
    for words in (shlex.split(line)[1:] for line in JAXTRAIN):
        words = words[words.index("--") + 1 :] if "--" in words else words
        read = [word for word in words[1:2] if word.startswith("runs/")]
        assert not read or read[0] in written, words
        given = [after for flag, after in pairwise(words) if flag in ("--run-dir", "--out")]
        if words[0] == "train":
            given = given or [f"runs/{Path(words[1]).stem}"]
        assert not set(given) & set(written), words
        written += given
    assert "runs/stdlib_lm" in written and len(written) > 3


LINKS = sorted(
    {
        (path.parent / target).resolve().relative_to(ROOT).as_posix()
        for path, text in {ROOT / "README.md": README, **PAGES}.items()
        for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
    }
)


@pytest.mark.parametrize("link", LINKS)
def test_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_stay_within_the_documentation(page: Path) -> None:
    """A site of them has nothing else: what lies elsewhere is named, and not linked."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", PAGES[page]):
        assert (page.parent / target).resolve().is_relative_to(ROOT / "docs"), target


def test_paths_that_are_named_exist() -> None:
    named = re.findall(r"`((?:jaxtrain|experiments|meshes|tests|docs)/[\w/.]*)`", TEXT)
    assert len(named) > 30
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_readme_is_short_and_leads_to_every_page() -> None:
    assert len(README.splitlines()) <= 190
    linked = {path for path in PAGES if f"(docs/{path.name})" in README}
    assert set(PAGES) - linked <= {ROOT / "docs" / "index.md", ROOT / "docs" / "reference.md"}


def test_every_page_is_in_the_sites_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(re.findall(r"(\w+\.md)$", settings, re.MULTILINE)) == {path.name for path in PAGES}


def test_the_reference_has_each_public_name_once() -> None:
    """Where a script finds it: at the top, or in a room of its own kind."""
    named = re.findall(r"^::: jaxtrain\.((?:\w+\.)?\w+)$", TEXT, re.MULTILINE)
    assert len(named) == len(set(named))
    rooms = {name for name in jaxtrain.__all__ if inspect.ismodule(getattr(jaxtrain, name))}
    top = set(jaxtrain.__all__) - rooms
    within = {
        f"{room}.{name}"
        for room in rooms - {"data", "checkpoint"}
        for name in getattr(jaxtrain, room).__all__
        if name not in top
    }
    assert top | within <= set(named)
    for room, _, name in (each.partition(".") for each in set(named) - top - within):
        assert name in getattr(jaxtrain, room).__all__, f"{room}.{name}"


def test_every_package_is_in_the_tree() -> None:
    packages = {f"jaxtrain/{p.parent.name}" for p in (ROOT / "jaxtrain").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"^\| `(jaxtrain/\w+)", TEXT, re.MULTILINE))


def test_packages_stand_in_the_order_of_their_layers() -> None:
    """A package imports only from those below it in the table of extending.md, as it says there."""
    order = re.findall(r"^\| `jaxtrain/(\w+)", TEXT, re.MULTILINE)
    for path in (ROOT / "jaxtrain").glob("*/*.py"):
        mine = path.parent.name
        source = path.read_text(encoding="utf-8")
        for other in re.findall(r"^\s*(?:from|import) jaxtrain\.(\w+)", source, re.MULTILINE):
            assert other == mine or order.index(other) > order.index(mine), f"{path}: {other}"


def test_experiment_excerpt_is_the_file() -> None:
    """With its imports, without its docstring."""
    (excerpt,) = (block for block in blocks("python") if "def experiment" in block)
    whole = ast.parse((ROOT / "experiments" / "stdlib_lm.py").read_text(encoding="utf-8"))
    assert ast.dump(ast.parse(excerpt)) == ast.dump(ast.Module(whole.body[1:], []))


def test_mesh_excerpt_is_the_file() -> None:
    kept = (ROOT / "meshes" / "cpu_8.toml").read_text(encoding="utf-8")
    excerpts = blocks("toml")
    assert excerpts and all(tomllib.loads(each) == tomllib.loads(kept) for each in excerpts)


def test_python_names_exist() -> None:
    """`jaxtrain.name` in code blocks and inline, and calls such as `fsdp()` in tables."""
    for block in blocks("python"):
        ast.parse(block)
    rooms = {path.stem for path in (ROOT / "jaxtrain").iterdir()}
    public = set(jaxtrain.__all__) - rooms
    for room in rooms & set(jaxtrain.__all__):
        public |= set(getattr(jaxtrain, room).__all__)
    dotted = set(re.findall(r"\bjaxtrain\.([a-zA-Z_]\w*)", TEXT)) - rooms
    called = {
        name
        for span in re.findall(r"`([^`\n]+)`", TEXT)
        for name in re.findall(r"^(?:\w+=)?([A-Za-z]\w*)\(", span)
    } - {"batch", "loss", "build", "experiment", *dir(jaxtrain.DecoderConfig), *dir(operations)}
    assert {"train", "check", "certify"} <= dotted and {"fsdp", "TextFiles"} <= called
    assert (dotted | called) - public == set()


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_every_dependency_is_pinned_within_its_bounds(python: str) -> None:
    chosen: dict[str, str] = {}
    for pin in pins():
        (specifier,) = pin.specifier
        assert specifier.operator == "==" and not pin.url, pin
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert pin.name not in chosen, f"{pin.name} is pinned twice for {python}"
            chosen[pin.name] = specifier.version
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["test"]]
    for requirement in map(Requirement, needed):
        assert requirement.specifier.contains(chosen[requirement.name]), requirement
    assert chosen["jax"].startswith({"3.11": "0.10.", "3.12": "0.12."}[python])


def test_extras() -> None:
    extras = PROJECT["optional-dependencies"]
    assert {"test", "docs", "parity", "tpu", "cuda12", "cuda13", "notebook"} <= set(extras)
    assert not any("torch" in requirement for requirement in extras["test"])
    named = set(re.findall(r"`?'?\.\[(\w+)\]", TEXT))
    assert named <= set(extras)


def test_the_example_of_collectives_runs() -> None:
    (example,) = [block for block in blocks("python") if "shard_map" in block]
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    gathered = names["gathered"]
    assert (gathered == names["rows"]).all() and gathered.sharding.is_fully_replicated


def test_the_log_has_each_entry_once_in_its_list() -> None:
    log = (ROOT / "experiments" / "LOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\d{4}-\d\d-\d\d)  (.*)$", log, re.MULTILINE)
    listed = re.findall(r"^- \[(.*)\]\(#(.*)\)$", log, re.MULTILINE)
    assert sorted(text for text, _ in listed) == sorted(question for _, question in entries)
    dates = {question: date for date, question in entries}
    for text, anchor in listed:
        words = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        assert anchor == f"{dates[text]}--{words}"
    assert [date for date, _ in entries] == sorted((date for date, _ in entries), reverse=True)


def lines_after(command: str, *, text: str) -> list[str]:
    """What a block of the documentation shows, the line of the command itself left out."""
    (block,) = (body for body in blocks("", text) if command in body)
    return [line for line in block.splitlines() if not line.startswith("$")]


def printed(*arguments: str) -> str:
    command = Path(sys.executable).parent / "jaxtrain"
    ran = subprocess.run(
        [command, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return ran.stdout + ran.stderr


@pytest.mark.slow
def test_what_compile_prints_is_what_it_says() -> None:
    shown = lines_after("jaxtrain compile", text=TEXT)
    assert len(shown) == 4
    found = printed("compile", "experiments/stdlib_lm.py", "--mesh", "meshes/cpu_8.toml")
    assert "\n".join(shown) in found


@pytest.mark.slow
def test_what_training_prints_is_what_it_says(tmp_path: Path) -> None:
    """The first lines, whose losses are the same to the bit on every start. CI has run this command
    with 10 steps, and names the file with what it printed."""
    (version,) = re.findall(r"\(here that of Python ([\d.]+)\)", README)
    if platform.python_version() != version:
        pytest.skip(f"what README shows was learned from the library of Python {version}")
    shown = lines_after("step 1/380", text=README)
    if before := os.environ.get("JAXTRAIN_MAIN_JOB"):
        found = Path(before).read_text(encoding="utf-8")
    else:
        found = printed(
            *("train", "experiments/stdlib_lm.py", "--mesh", "meshes/cpu_8.toml"),
            *("--run-dir", str(tmp_path / "run"), "--steps", "10"),
        )
    shown = [line.partition(" ")[2] for line in shown]  # without the time
    assert shown[2] in found and shown[3].partition(", ")[0] in found
    # What another test has tokenised just now is not tokenised again.
    assert {*re.findall(r"tokenising .*", found)} <= {*shown[:2]}
    for line in shown[4:6]:
        step, loss = re.match(r"step (\d+)/380 loss (\d\.\d+)", line).groups()  # type: ignore[union-attr]
        assert re.search(rf"^[\d:]+ step {step}/10 loss {loss}\b", found, re.MULTILINE), found


def test_citation_and_licence_are_the_projects() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"version: {PROJECT['version']}\n" in citation
    assert f"license: {PROJECT['license']}\n" in citation
    assert "Apache License\n" in (ROOT / "LICENSE").read_text(encoding="utf-8")
