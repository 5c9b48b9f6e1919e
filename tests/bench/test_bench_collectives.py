"""`bench collectives`: only right results are timed, in fair turns, and a process that fails says
why."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtrain.bench import collectives as parent
from jaxtrain.bench import collectives_worker as worker
from jaxtrain.bench.collectives import (
    HEAD,
    MEASURED,
    AlgorithmRow,
    CollectivesReport,
    bench_collectives,
    cases_of,
    read_size,
    worker_environment,
)
from jaxtrain.bench.collectives_worker import Bench, calls, local_shapes
from jaxtrain.bench.processes import answers
from jaxtrain.collectives.ring import Ring
from jaxtrain.mesh.mesh import load_mesh, make_mesh, mesh_from_axes

ROOT = Path(__file__).parents[2]
CPU_8, H100_8 = (load_mesh(ROOT / "meshes" / f"{name}.toml") for name in ("cpu_8", "h100_8"))
SPLIT = mesh_from_axes(data=2, tensor=2)


ROOTED = {"broadcast", "reduce", "gather", "scatter"}
RINGS = {"ring_1", "ring_2", "ring_1_looped", "ring_2_looped"}


def algorithms_of(name: str) -> set[str]:
    return RINGS if "matmul" in name else RINGS | {"recursive"}


def bench_on(spec) -> Bench:
    return Bench(make_mesh(spec), tuple(axis for axis, size in spec.axes if size > 1))


# What is timed


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("n", [2, 3, 8])
@pytest.mark.parametrize("elements", [24, 24 * 512, 2**20 * 3])
def test_the_whole_buffer_has_the_bytes_asked_for(name: str, n: int, elements: int) -> None:
    shapes = local_shapes(name, n, 4 * elements)
    if name == "gather_matmul":
        (tokens, width), weight = shapes
        assert n * tokens * width == elements and weight[0] == width
    elif name == "matmul_scatter":
        (tokens, inner), (rows, width) = shapes
        assert tokens * width == elements and inner == rows and tokens % n == 0
    else:
        (size,) = shapes[0]
        assert size * (n if name in ("all_gather", "gather") else 1) == elements


@pytest.mark.parametrize("name", MEASURED)
def test_all_algorithms_give_what_lax_gives_and_are_timed(name: str, monkeypatch) -> None:
    monkeypatch.setattr(worker, "calls", lambda nbytes: 2)
    found = bench_on(SPLIT).measure(name, 256, algorithms_of(name))
    assert found.keys() == {"lax", *algorithms_of(name)}
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in found.values())


class OneLate(Ring):
    """A ring whose last device is off by one in one element."""

    def reduce_scatter(self, x, axes, dim):
        last = jax.lax.axis_index(axes) == jax.lax.axis_size(axes) - 1
        return super().reduce_scatter(x, axes, dim).at[-1].add(last.astype(x.dtype))


def test_a_wrong_result_is_not_timed(monkeypatch) -> None:
    monkeypatch.setitem(worker.ALGORITHMS, "ring_2", OneLate())
    monkeypatch.setattr(Bench, "take_turns", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(RuntimeError, match="ring_2 reduce_scatter of 256 B is not what lax gives"):
        bench_on(SPLIT).measure("reduce_scatter", 256, ("ring_1", "ring_2"))


def test_a_result_of_zeros_everywhere_would_be_seen() -> None:
    """The operands differ between devices, are not zero, and their sums are exact."""
    x = np.asarray(bench_on(SPLIT).operand((64,))).reshape(4, 64)
    assert len({row.tobytes() for row in x}) == 4
    assert (x == np.round(x)).all() and np.abs(x).max() == 2
    big = np.resize(x, (4, 512)).astype(np.float32)
    assert np.array_equal(big[::-1].sum(0), big.astype(np.float64).sum(0))


def test_turns_are_fair() -> None:
    asked: list[str] = []

    def program(name):
        return lambda x: (asked.append(name), x)[1]

    bench, names = bench_on(SPLIT), ["lax", "a", "b"]
    seconds = bench.take_turns({n: program(n) for n in names}, [bench.operand((1,))], 6)
    rounds = np.reshape(asked, (6, 3))
    assert {tuple(sorted(turn)) for turn in rounds} == {("a", "b", "lax")}
    assert sorted(rounds[:, 0]) == sorted(names * 2)  # nobody is always first
    assert {name: len(each) for name, each in seconds.items()} == dict.fromkeys(names, 6)


def test_calls_are_several_and_fewer_where_they_take_long() -> None:
    counts = [calls(size) for size in parent.SIZES]
    assert counts == sorted(counts, reverse=True) and counts[-1] >= 3


def test_by_default_all_is_measured_in_one_process_and_what_matters_across() -> None:
    cases = {
        (p, name, size): set(algorithms)
        for p in (1, 2)
        for name, size, algorithms in cases_of(p, None, None, (4096, 16 << 20, 64 << 20))
    }
    assert {name for p, name, _ in cases if p == 1} == set(MEASURED)
    assert {name for p, name, _ in cases if p == 2} == set(MEASURED) - ROOTED
    for (processes, name, size), algorithms in cases.items():
        looped = set() if processes == 1 else {a for a in RINGS if "looped" in a}
        few = size > 16 << 20
        assert algorithms == ({"ring_1", "ring_2"} if few else algorithms_of(name) - looped)


def test_the_default_sizes_split_over_any_number_of_devices(monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(parent, "answers", lambda *_, **__: iter(()))
    monkeypatch.setattr(parent, "cases_of", lambda p, c, a, sizes: asked.extend(sizes) or [])
    for devices, least in ((8, 4096), (6, 4104)):
        asked.clear()
        bench_collectives(mesh_from_axes(data=devices), processes=(1,))
        assert min(asked) == least and all(size % (4 * devices) == 0 for size in asked)


def test_what_is_asked_for_is_measured_everywhere() -> None:
    asked = ("recursive", "ring_1_looped")
    for processes in (1, 4):
        assert cases_of(processes, ("scatter", "gather_matmul"), asked, (64 << 20,)) == [
            ("scatter", 64 << 20, asked),
            ("gather_matmul", 64 << 20, asked[1:]),
        ]
        assert cases_of(processes, ("gather_matmul",), asked[:1], (4096,)) == []


# Processes


def told_by(*programs: str, silent_s: float = 60.0) -> list:
    return list(answers([(["-c", text], dict(os.environ)) for text in programs], silent_s=silent_s))


SAY = "import json, time\ndef say(**facts): print(json.dumps(facts), flush=True)\n"


def test_what_all_processes_have_said_comes_together() -> None:
    fast = SAY + "say(a=1); print('a library says hello'); say(a=2)"
    slow = SAY + "time.sleep(0.3); say(a=3); time.sleep(0.3); print('{\"a\"', end=''); say2 = 1\n"
    slow += "print(': 4}')"
    assert told_by(fast, slow) == [[{"a": 1}, {"a": 3}], [{"a": 2}, {"a": 4}]]


WAIT = "import os, pathlib, sys, time\npathlib.Path({!r}).write_text(str(os.getpid()))\n"
FAILS = {
    "fails": ("raise SystemExit('out of luck')", RuntimeError, r"ended with 1:\nout of luck"),
    "is killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        RuntimeError,
        "ended with -9",
    ),
    "refuses": ('print(\'{"refused": "too big"}\')', ValueError, "^too big$"),
    "is silent": ("import time; time.sleep(60)", RuntimeError, "no result for 2 seconds"),
}


@pytest.mark.parametrize(("program", "error", "said"), FAILS.values(), ids=FAILS)
def test_a_process_that_fails_says_why_and_none_is_left(
    program: str, error: type[Exception], said: str, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    waits = WAIT.format(str(pid)) + "time.sleep(60)"
    started = f"import os, time\nwhile not os.path.exists({str(pid)!r}): time.sleep(0.01)\n"
    with pytest.raises(error, match=said):
        told_by(waits, started + program, silent_s=2)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Killed, it can close nothing itself."""
    pid, module = tmp_path / "pid", "from jaxtrain.bench.processes import"
    waits = WAIT.format(str(pid)) + f"{module} end_with_parent\nend_with_parent()\ntime.sleep(60)"
    starts = f"import os; {module} answers\n"
    starts += f"list(answers([(['-c', {waits!r}], dict(os.environ))], silent_s=60))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", starts], env=env) as parent:
        within(30, lambda: pid.exists() and pid.read_text())
        parent.kill()
    number = int(pid.read_text())
    within(30, lambda: not alive(number))


def alive(pid: int) -> bool:
    """A process that has ended and that nobody has waited for yet is not."""
    status = Path(f"/proc/{pid}/stat")
    try:
        return status.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def within(seconds: float, happened: Callable[[], object]) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_process_has_its_share_of_the_devices(processes: int) -> None:
    flags = "--xla_force_host_platform_device_count=3 --xla_cpu_enable_fast_math=false"
    env = worker_environment(CPU_8, processes, {"XLA_FLAGS": flags, "HOME": "/home"})
    assert sorted(env["XLA_FLAGS"].split()) == [
        "--xla_cpu_enable_fast_math=false",
        f"--xla_force_host_platform_device_count={8 // processes}",
    ]
    assert (env["JAX_PLATFORMS"], env["HOME"]) == ("cpu", "/home")
    assert "XLA_FLAGS" not in worker_environment(H100_8, 1, {})


# What is refused

REFUSED = {
    "one device": (mesh_from_axes(data=1), {"processes": (1,)}, "this mesh has one"),
    "name": (CPU_8, {"collectives": ("all_gathr",)}, "'all_gathr' is not known.*'all_gather'"),
    "algorithm": (CPU_8, {"algorithms": ("ring2",)}, "'ring2' is not known.*'ring_2'"),
    "no algorithm": (CPU_8, {"algorithms": ()}, "no algorithms are given"),
    "no matmul": (
        CPU_8,
        {"collectives": ("gather_matmul",), "algorithms": ("recursive",)},
        "no collective matmul by recursive; add a ring",
    ),
    "no name": (CPU_8, {"collectives": ()}, "no collectives are given"),
    "size": (CPU_8, {"sizes": (33,)}, "size 33 .* over 8 devices; use 64"),
    "no bytes": (CPU_8, {"sizes": (0,)}, "size 0 .*; use 32"),
    "processes": (CPU_8, {"processes": (3,)}, "processes=3; use 1, 2, 4, 8"),
    "on GPUs": (H100_8, {"processes": (2,)}, "use processes=1, or --simulate"),
}


@pytest.mark.parametrize(("spec", "asked", "said"), REFUSED.values(), ids=REFUSED)
def test_refusals(spec, asked: dict, said: str, monkeypatch) -> None:
    monkeypatch.setattr(parent, "answers", lambda *_, **__: pytest.fail("a process was started"))
    with pytest.raises(ValueError, match=said):
        bench_collectives(spec, **asked)


def test_every_violation_is_told_at_once() -> None:
    with pytest.raises(ValueError) as error:
        bench_collectives(CPU_8, collectives=("al",), sizes=(7,), processes=(5, 3))
    for said in ("'al'", "size 7", "processes=5", "processes=3"):
        assert said in str(error.value)


def test_devices_that_are_not_here_are_refused() -> None:
    with pytest.raises(ValueError, match=r"h100_8.toml needs 8 devices"):
        bench_collectives(H100_8, collectives=("all_reduce",), sizes=(1024,))


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("512", 512), ("4KiB", 4096), (" 64 mib ", 2**26), ("1GiB", 2**30)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert read_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "big", "4KB", "-1", "1.5MiB"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write 65536, 64KiB or 1MiB"):
        read_size(text)


# What is told


def told(**seconds: list[float]) -> dict:
    names = ("lax", "ring_1", "ring_2", "recursive")
    return {
        "collective": "all_reduce",
        "bytes": 8000,
        "seconds": {name: seconds.get(name, [1.0, 1.0, 1.0]) for name in names},
    }


def test_a_call_takes_as_long_as_its_last_process(monkeypatch) -> None:
    """Median over calls of the longest over processes; not of one process, nor the other way."""
    both = [told(lax=[1, 9, 2], ring_1=[1, 2, 30]), told(lax=[8, 1, 1], ring_1=[10, 3, 1])]
    monkeypatch.setattr(parent, "answers", lambda commands, silent_s: iter([both[: len(commands)]]))
    lines: list[str] = []
    report = bench_collectives(
        CPU_8,
        collectives=("all_reduce",),
        sizes=(8000,),
        processes=(1, 2),
        progress=lines.append,
    )
    one, two = (
        next(r for r in report.rows if (r.processes, r.algorithm) == (p, "ring_1")) for p in (1, 2)
    )
    assert (one.lax_seconds, one.seconds, one.ratio) == (2, 2, 1)
    assert (two.lax_seconds, two.seconds, two.ratio) == (8, 10, 1.25)
    assert one.sent_bytes == two.sent_bytes == 2 * 7 / 8 * 8000
    # 14 hops of 500 us where two directions need 8, and the same bytes at 0.25 GB/s.
    assert one.predicted_ratio == pytest.approx((14 * 500 + 56) / (8 * 500 + 56))
    assert two.predicted_ratio is None
    assert report.table().splitlines()[: len(lines)] == lines
    assert lines[0] == HEAD and len(lines) == 3


def test_the_report_says_where_we_are_faster() -> None:
    row = AlgorithmRow("all_reduce", "ring_1", 2, 1 << 20, 1.0, 2.0, 7.0, None)
    report = CollectivesReport("here", 8, (row, replace(row, bytes=4096, seconds=3.0)))
    assert report.summary() == "across 2 processes, faster than lax: ring_1 1 of 2"
    assert "0.50" in report.table() and "1MiB" in report.table() and "4KiB" in report.table()
    found = report.as_json()["rows"][0]
    assert found == {
        "collective": "all_reduce",
        "algorithm": "ring_1",
        "processes": 2,
        "bytes": 1 << 20,
        "seconds": 1.0,
        "lax_seconds": 2.0,
        "ratio": 0.5,
        "sent_bytes": 7.0,
        "predicted_ratio": None,
    }


# The whole of it


@pytest.mark.exhaustive
def test_rings_are_measured_in_one_process_and_across_two() -> None:
    names, asked = ("reduce_scatter", "gather_matmul"), ("ring_1", "ring_2_looped")
    report = bench_collectives(
        mesh_from_axes(data=4),
        collectives=names,
        algorithms=asked,
        sizes=(2048,),
        processes=(1, 2),
    )
    json.dumps(report.as_json(), allow_nan=False)
    wanted = {(p, name, a) for p in (1, 2) for name in names for a in asked}
    assert {(r.processes, r.collective, r.algorithm) for r in report.rows} == wanted
    for row in report.rows:
        assert 0 < row.seconds < 60 and 0 < row.lax_seconds < 60
        assert math.isclose(row.sent_bytes, 3 / 4 * 2048)
