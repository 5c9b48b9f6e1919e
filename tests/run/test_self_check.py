"""A kernel, a collective or an option that computes something else is found before the first step,
and a run that is well does not change for it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jaxtrain
from jaxtrain import Health
from jaxtrain.attention import Reference
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.collectives import Collectives, Ring
from jaxtrain.compression import Compressed, Int8
from jaxtrain.health import checks, self_check
from jaxtrain.health.self_check import (
    Aspect,
    SelfCheck,
    _with,
    aspects_of,
    bound_of,
    uncompressed,
)
from jaxtrain.nn.stack import LayerLoop
from jaxtrain.optim.precision import bf16, fp16, fp32
from jaxtrain.step.assembly import assemble


@dataclass(frozen=True)
class OffBy:
    """Attention that is wrong by so large a share."""

    share: float

    def __call__(
        self, q: Any, k: Any, v: Any, starts: Any, scoring: Any
    ) -> tuple[jax.Array, jax.Array]:
        o, lse = Reference()(q, k, v, starts, scoring)
        return o * (1 + self.share), lse


@pytest.fixture
def run(decoder: jaxtrain.Experiment, tmp_path: Path) -> Callable[..., Any]:
    """The result of a run, and what it told."""

    def train(check: int | None, mesh: Any, experiment: Any = decoder, **execution: Any) -> Any:
        stream, execution["health"] = io.StringIO(), Health(self_check=check)
        e = replace(experiment, execution=replace(experiment.execution, **execution), steps=5)
        e = replace(e, checkpoints=jaxtrain.SavePolicy(every=2))
        folder = tmp_path / f"run{check}"
        found = jaxtrain.train(e, mesh, run_dir=folder, cache_dir=tmp_path, stream=stream)
        return found, stream.getvalue()

    return train


def test_a_run_that_is_well_is_the_same_to_the_bit(run, tmp_path: Path) -> None:
    """Our collectives held against XLA's."""
    mesh = jaxtrain.mesh_from_axes(fsdp=2)
    losses = []
    for check in (None, 3):
        found, said = run(check, mesh)
        losses.append([(line["loss"], line["grad_norm"]) for line in found.history])
        assert ("NOTE self-check: 3 steps are within" in said) == bool(check)
    assert "safe configuration, which differs in attention, mode" in said
    assert losses[0] == losses[1] and len(losses[0]) == 5


def test_a_wrong_kernel_is_found_before_anything_is_saved(run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="self-check") as caught:
        run(2, jaxtrain.mesh_from_axes(data=1), attention=OffBy(0.01))
    said = str(caught.value)
    assert "step 1 has grad_norm " in said and "at most 1.0e-05" in said
    assert "the two differ in attention=OffBy(share=0.01); nothing was saved" in said
    assert said.endswith("use another execution.attention")
    assert not list((tmp_path / "run2").glob("checkpoints/[0-9]*"))


def test_a_wrong_collective_is_found(opened, decoder, monkeypatch) -> None:
    """Of the explicit step alone, and by a thousandth; of a resumed run the step is its own."""
    from jaxtrain.step import gradients

    right = gradients.all_reduce_sums
    wrong = lambda sums, axes: jax.tree.map(lambda x: x * 1.001, right(sums, axes))  # noqa: E731
    monkeypatch.setattr(gradients, "all_reduce_sums", wrong)
    session = opened(_with(decoder, attention=Reference()), data=2)
    session.start = 4
    with pytest.raises(ValueError, match=r"step 5 has .* use execution.mode='gspmd'"):
        checked(session, 1)
    session.assembly = replace(session.assembly, sizes={})  # nothing differs any more
    assert not SelfCheck(session, copied).aspects


def test_a_compiler_option_is_taken_away_in_the_safe_one(opened, own, monkeypatch) -> None:
    """Programs with one stand in for spoilt ones: it is blamed, and not what changes nothing. The
    batches are there again, and a process that finds no difference is refused with the others."""
    compile_step = self_check.compile_step

    def compiled(assembly: Any, *given: Any) -> Any:
        program = compile_step(assembly, *given)
        return spoilt(program) if assembly.spec.compiler_options else program

    session = with_option(opened(own))
    told = checked(session, 2)
    assert "NOTE self-check: 2 steps are within 0.0e+00 of the safe configuration" in told[0]
    assert session.loader.next()[0] == 0, "the run begins with the batches that were looked at"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(self_check, "all_gather_union", lambda mine: [*mine, "step 1 has .."])
        with pytest.raises(ValueError, match="another process found a difference"):
            checked(session, 2)
    monkeypatch.setattr(self_check, "compile_step", compiled)
    session.compiled = {key: spoilt(program) for key, program in session.compiled.items()}
    idle = Aspect(lambda e, spec: (e, spec), "use something else")
    with pytest.raises(
        ValueError, match=r"=True\), idle; with compiler_options .* alone"
    ) as caught:
        checked(session, 2, idle=idle)
    assert str(caught.value).endswith("saved: remove the compiler options from the mesh file")


def spoilt(program: Any) -> Any:
    def run(state: Any, batch: Any) -> Any:
        state, metrics = program(state, batch)
        return state, metrics | {"grad_norm": metrics["grad_norm"] * (1 + 1e-4)}

    return run


def copied(state: Any) -> Any:
    return jax.tree.map(jnp.copy, state)


def checked(session: Any, steps: int, **more: Aspect) -> list[str]:
    told: list[str] = []
    check = SelfCheck(session, copied)
    check.aspects |= more
    check.run(steps, told.append)
    return told


def with_option(session: Any) -> Any:
    options = (("xla_llvm_disable_expensive_passes", True),)
    spec = replace(session.assembly.spec, compiler_options=options)
    session.assembly = replace(session.assembly, spec=spec)
    return session


def test_what_is_safe_already_is_held_to_nothing(opened, own) -> None:
    told = checked(opened(own), 2)
    assert told == [
        "NOTE self-check: this is the safe configuration already; nothing to hold it to"
    ]


REMAT = LayerLoop(unroll=False, remat="full")
PLAIN: dict[str, Any] = dict(attention=Reference(), loop=LayerLoop(unroll=True, remat="none"))
ASPECTS: dict[str, tuple[dict[str, Any], dict[str, int], list[str]]] = {
    "nothing": (PLAIN, {}, []),
    "gspmd": (PLAIN | dict(mode="gspmd"), dict(data=2), []),
    "our collectives": (PLAIN, dict(data=2), ["mode='explicit'"]),
    "a kernel": (PLAIN | dict(attention=OffBy(0.0)), {}, ["attention=OffBy"]),
    "the platform's kernel": (PLAIN | dict(attention=None), {}, ["attention=PlatformKernel"]),
    "a loop that fetches ahead": (PLAIN | dict(loop=replace(REMAT, remat="none")), {}, ["loop="]),
    "one that computes again": (
        PLAIN | dict(loop=replace(REMAT, prefetch=False)), {}, ["loop=LayerLoop"],
    ),
    "stages, of which XLA has none": (PLAIN, dict(stage=2), []),
    "stages and rings": (
        PLAIN | dict(collectives=Collectives(Ring(), Ring())), dict(stage=2), ["mode='explicit'"],
    ),
    "compressed sums, which are left out": (
        PLAIN | dict(reducer=Compressed(Int8()), small_leaf=1), dict(data=2), ["mode='explicit'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASPECTS)
def test_what_is_otherwise_is_what_could_be_wrong(name: str, decoder) -> None:
    execution, axes, wanted = ASPECTS[name]
    experiment = replace(_with(decoder, **execution), microbatches=2)
    if "stage" in axes:
        experiment = replace(experiment, model=replace(experiment.model, layers=2))
    assembly = uncompressed(assemble(experiment, jaxtrain.mesh_from_axes(**(axes or {"data": 1}))))
    found = aspects_of(assembly)
    assert len(found) == len(wanted)
    assert all(each.startswith(begin) for each, begin in zip(found, wanted, strict=True))
    given = (assembly.experiment, assembly.spec)
    for aspect in found.values():
        given = aspect.plain(*given)
    plain = assemble(*given)
    assert not aspects_of(replace(plain, experiment=_with(plain.experiment, attention=Reference())))
    assert not plain.abstract.residuals


BOUND = {
    "fp32": (fp32, 1e-5),
    "bf16": (bf16, 3e-2),
    "fp16": (fp16, 3e-2),
    "gradients in 16 bits": (replace(fp32, reduce=jnp.bfloat16), 3e-2),
    "on CPU any fp32 product is one": (replace(fp32, matmul="default"), 1e-5),
}


@pytest.mark.parametrize("name", BOUND)
def test_the_bound_is_that_of_the_narrowest_dtype(name: str, decoder) -> None:
    precision, bound = BOUND[name]
    mesh = jaxtrain.mesh_from_axes(data=1)
    assert bound_of(assemble(replace(decoder, precision=precision), mesh)) == bound


def test_products_in_passes_have_the_wide_bound_where_they_are_passes(decoder) -> None:
    spec = jaxtrain.load_mesh("h100_8")
    for matmul, bound in (("highest", 1e-5), ("default", 3e-2)):
        precision = replace(fp32, matmul=matmul)
        experiment = replace(decoder, precision=precision)
        assert bound_of(assemble(experiment, spec)) == bound


def test_rounding_may_grow_with_the_steps_and_no_number_is_like_none(opened, own) -> None:
    check = SelfCheck(opened(own), copied)
    apart = lambda here, safe: [each.step for each in check._apart(here, safe)]  # noqa: E731
    right, inf, nan = (1.0, 1.0), float("inf"), float("nan")
    assert apart([(1.0, 1.00002)], [right]) == [1]
    assert apart([right] * 10 + [(1.0, 1.00002)], [right] * 11) == []
    assert apart([(nan, inf)], [(nan, nan)]) == []
    assert apart([(nan, 1.0)], [right]) == apart([right], [(1.0, inf)]) == [1]


def test_more_steps_than_can_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"self_check=33 steps are more .* use 32 or fewer"):
        Health(self_check=33)
    with pytest.raises(ValueError, match="self_check=0"):
        Health(self_check=0)


def test_the_plain_kernel_is_dense_where_it_is_small(monkeypatch) -> None:
    q = jnp.ones((2, 4, 2, 8))
    scoring = Scoring(AttentionMask(causal=True, window=None), scale=1.0, softcap=None)
    asked = []
    for name in ("Reference", "Blockwise"):
        monkeypatch.setattr(self_check, name, lambda name=name: lambda *_: asked.append(name))
    monkeypatch.setattr(self_check, "DENSE_BYTES", 4 * 2 * 2 * 4**2 // 2)
    for devices in (1, 2):
        self_check.plain_kernel(devices)(q, q, q, None, scoring)
    assert asked == ["Blockwise", "Reference"]


def test_where_the_chip_has_no_room_the_safe_step_computes_again(opened, own, monkeypatch) -> None:
    """As XLA says it before it compiles, or after."""
    session = opened(own)
    check, assembly = SelfCheck(session, copied), session.assembly
    chip = replace(assembly, spec=jaxtrain.load_mesh("h100_8"))
    sizes: list[int] = []

    def compile_step(asked: Any, *given: Any) -> Any:
        if asked.loop.remat == "full":
            return "full"
        if sizes[-1] < 0:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        found = SimpleNamespace(argument_size_in_bytes=sizes[-1], temp_size_in_bytes=sizes[-1])
        return SimpleNamespace(memory_analysis=lambda: found)

    monkeypatch.setattr(self_check, "compile_step", compile_step)
    room = int(chip.spec.usable_bytes)
    cases = ((assembly, room, 0), (chip, room // 4, 0), (chip, room // 2, 1), (chip, -1, 1))
    for asked, size, full in cases:
        sizes.append(size)
        assert (check._compiled(asked, session.shardings, {}) == "full") == bool(full)


@pytest.mark.parametrize(("start", "taken"), [(0, [3]), (18, [2]), (20, [])])
def test_no_more_steps_are_checked_than_are_left(start, taken, opened, own, monkeypatch) -> None:
    """Of 20."""
    ran: list[int] = []
    made = SimpleNamespace(run=lambda steps, tell: ran.append(steps))
    monkeypatch.setattr(checks, "SelfCheck", lambda *_: made)
    session = opened(own)
    session.start = start
    checks.HealthChecks(Health(self_check=3), session, print).begin()
    checks.HealthChecks(Health(replay=3), session, print).begin()
    assert ran == taken
