"""Whole runs: what a run directory holds, resuming to the bit, and what is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import Asking

import jaxtrain
from jaxtrain.cluster.pace import Pace
from jaxtrain.data import BatchRamp, Loader
from jaxtrain.experiment import config_of
from jaxtrain.run import loop
from jaxtrain.run.result import Result
from jaxtrain.run.saving import Saving
from jaxtrain.session import session
from jaxtrain.session.evaluate import Evaluator

STEPS = 6
Train = Callable[..., Result]


@pytest.fixture
def trained(tmp_path: Path) -> Train:
    """train() of 6 steps into a directory below tmp_path, saving at the end only."""

    def run(experiment: jaxtrain.Experiment, *, name: str | None = "run", **options: Any) -> Result:
        axes = options.pop("axes", {"fsdp": 2})
        policy = experiment.checkpoints or jaxtrain.SavePolicy(every=1000)
        return jaxtrain.train(
            replace(experiment, steps=STEPS, checkpoints=policy),
            jaxtrain.mesh_from_axes(**axes),
            run_dir=None if name is None else tmp_path / name,
            cache_dir=tmp_path / "cache",
            stream=options.pop("stream", io.StringIO()),
            **options,
        )

    return run


def after(steps: int, then: Callable[[], Any]) -> Callable[[], bool]:
    """Does `then` when it is asked for the `steps`-th time."""
    asked = []

    def ask() -> bool:
        asked.append(None)
        return bool(then()) if len(asked) == steps else False

    return ask


def interrupt() -> None:
    raise KeyboardInterrupt


def losses(result: Result) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in result.history}


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def state_of(result: Result) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.session.state)]


def assert_same_state(a: Result, b: Result) -> None:
    for x, y in zip(state_of(a), state_of(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_run_directory_holds_what_every_tool_reads(
    decoder: jaxtrain.Experiment, trained: Train, tmp_path: Path
) -> None:
    words = "the quick brown fox jumps over the lazy dog and runs away from it again. "
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(words[i:] * 4)
    held = str(tmp_path / "7.txt")
    source = jaxtrain.TextFiles(str(tmp_path / "?.txt"), held_out_patterns=held)
    experiment = replace(
        decoder,
        model=replace(decoder.model, vocab=257, vocab_multiple=4),
        data=jaxtrain.TextData(source, jaxtrain.data.ByteTokenizer(), seq=16),
        evaluation=jaxtrain.Evaluation(
            every=3,
            batches=1,
            final_batches=1,
            sample=jaxtrain.Sample("the ", tokens=12, temperature=0.8),
        ),
        logging=jaxtrain.Logging(every=2, profile=jaxtrain.Steps(1, 1)),
        checkpoints=jaxtrain.SavePolicy(every=4, keep=2),
    )
    stream = io.StringIO()
    result = trained(experiment, stream=stream)
    run, said = tmp_path / "run", stream.getvalue()

    more = jaxtrain.generate(result.session, "the ", tokens=12, temperature=0.8)
    assert result.sample == "the " + more

    logged = lines(run)
    assert [line["step"] for line in logged] == [1, 2, 3, 4, 6], "first, every second, evaluated"
    assert all({"step", "loss", "tokens_per_s", "step_s", "data_s"} <= set(line) for line in logged)
    assert all({"eval_loss", "bits_per_byte"} <= set(logged[i]) for i in (2, 4))
    assert {"grad_norm", "param_norm", "update_norm", "learning_rate", "skipped"} <= set(logged[1])
    for line in logged[1:]:
        assert line["tokens_per_s"] * line["step_s"] == pytest.approx(8 * 16)

    config = json.loads((run / "config.json").read_text())
    assert config["experiment"]["steps"] == STEPS
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["4", "6"]
    assert list((run / "events").iterdir())
    assert [p for p in (run / "profile").rglob("*") if p.is_file()], "no trace was written"

    assert result.steps == STEPS and not result.stopped
    assert [line["step"] for line in result.history] == list(range(1, STEPS + 1))
    assert result.sample.startswith("the ") and len(result.sample.encode()) >= 4 + 12
    assert result.sample in said
    bits = result.evaluation
    assert bits["bits_per_byte"] == pytest.approx(bits["eval_loss"] / np.log(2))
    assert bits["bigram_bits_per_byte"] < bits["unigram_bits_per_byte"] < 8
    assert "bits per byte" in said


STOPS = {
    "steps=N": {"steps": 3},
    "a callback": {"callbacks": lambda: [Asking(after(3, lambda: True))]},
    "KeyboardInterrupt": {"callbacks": lambda: [Asking(after(3, interrupt))]},
}


@pytest.mark.parametrize("how", STOPS)
def test_a_stopped_run_goes_on_to_the_bit(
    how: str, own: jaxtrain.Experiment, trained: Train, tmp_path: Path
) -> None:
    experiment = replace(own, optimizer=jaxtrain.AdamW(1e-2), ema_decay=0.9, microbatches=2)
    whole = trained(experiment, name="whole")
    options = {k: v() if callable(v) else v for k, v in STOPS[how].items()}
    if how == "KeyboardInterrupt":
        with pytest.raises(KeyboardInterrupt):
            trained(experiment, **options)
    else:
        part = trained(experiment, **options)
        assert part.stopped == (how == "a callback")
        assert part.steps == 3
    stream = io.StringIO()
    rest = trained(experiment, stream=stream)
    assert "resuming at step 3" in stream.getvalue()
    assert losses(rest) == {k: v for k, v in losses(whole).items() if k > 3}
    assert_same_state(rest, whole)
    logged = {line["step"]: line["loss"] for line in lines(tmp_path / "run")}
    assert logged == losses(whole), "each step once, before the stop and after"


@pytest.mark.slow
def test_a_decoder_with_dropout_in_fp16_resumes_to_the_bit(
    decoder: jaxtrain.Experiment, trained: Train
) -> None:
    experiment = replace(
        decoder,
        model=replace(decoder.model, dropout=0.2),
        precision=replace(
            jaxtrain.optim.fp16, loss_scale=jaxtrain.optim.LossScale(2.0**22, window=2)
        ),
        microbatches=2,
    )
    axes = {"fsdp": 2, "tensor": 2}
    whole = trained(experiment, name="whole", axes=axes)
    assert max(line["skipped"] for line in whole.history) > 0, "make the scale too large at first"
    trained(experiment, steps=3, axes=axes)
    rest = trained(experiment, axes=axes)
    assert losses(rest) == {k: v for k, v in losses(whole).items() if k > 3}
    assert_same_state(rest, whole)


def test_an_interrupt_while_waiting_for_data_loses_nothing(
    own: jaxtrain.Experiment, trained: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(own, name="whole")
    with monkeypatch.context() as patch:
        given = after(4, interrupt)
        following = Loader.next
        patch.setattr(Loader, "next", lambda loader: (given(), following(loader))[1])
        with pytest.raises(KeyboardInterrupt):
            trained(own)
    rest = trained(own)
    assert losses(rest) == {k: v for k, v in losses(whole).items() if k > 3}
    assert_same_state(rest, whole)


def test_a_signal_within_a_step_waits_for_it(
    own: jaxtrain.Experiment, trained: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old state is donated, and the new one is not there yet."""
    whole = trained(own, name="whole")
    compile_step = session.compile_step

    def signalled(*args: Any) -> Callable[..., Any]:
        program = compile_step(*args)
        send = after(3, lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(0.1)))

        def run(state: Any, batch: Any) -> Any:
            out = program(state, batch)
            send()
            return out

        return run

    stream = io.StringIO()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(session, "compile_step", signalled)
        trained(own, stream=stream)
    assert "saved step 3" in stream.getvalue()
    assert_same_state(trained(own), whole)


@pytest.mark.parametrize("then", [lambda: True, interrupt], ids=["stop", "interrupt"])
def test_interrupts_while_it_saves_lose_nothing(
    own: jaxtrain.Experiment, trained: Train, monkeypatch: pytest.MonkeyPatch, then: Any
) -> None:
    """Five of them, 5 ms apart: they end the wait for the save, not the save."""
    whole, save, stream = trained(own, name="whole"), Saving._save, io.StringIO()
    threads = []

    def struck(*args: Any, **options: Any) -> None:
        threads.append(threading.current_thread())
        for _ in range(5):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.005)
        save(*args, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Saving, "_save", struck)
        trained(own, stream=stream, callbacks=[Asking(after(3, then))])
    assert len(threads) == 1 and threads[0] is not threading.main_thread()
    assert "interrupted; saved step 3" in stream.getvalue()
    assert_same_state(trained(own), whole)


@pytest.mark.parametrize("then", [lambda: True, interrupt], ids=["stop", "interrupt"])
def test_stopping_at_a_step_that_was_just_saved(
    own: jaxtrain.Experiment, trained: Train, tmp_path: Path, then: Callable[[], Any]
) -> None:
    """The save is in flight when the second request for it comes."""
    experiment = replace(own, checkpoints=jaxtrain.SavePolicy(every=2))
    if then is interrupt:
        with pytest.raises(KeyboardInterrupt):
            trained(experiment, callbacks=[Asking(after(1, then), "after_save")])
    else:
        assert trained(experiment, callbacks=[Asking(after(2, then))]).stopped
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["2"]


def test_a_finished_run_started_again_trains_no_more(
    own: jaxtrain.Experiment, trained: Train, tmp_path: Path
) -> None:
    part, said = trained(own, steps=4), io.StringIO()
    again = trained(own, steps=4, stream=said)
    assert again.steps == 4 and again.loss == part.loss and not again.stopped
    assert "the 4 steps asked for, of 6, are done" in said.getvalue()
    first = trained(own)
    before, said = lines(tmp_path / "run"), io.StringIO()
    again = trained(own, stream=said)
    assert again.steps == STEPS and again.loss == first.loss and not again.stopped
    assert "all 6 steps are done" in said.getvalue()
    assert_same_state(again, first)
    assert lines(tmp_path / "run") == before


@pytest.mark.parametrize("axes", [{"fsdp": 2}, {"data": 1}])
def test_a_run_of_fewer_steps_than_are_done_is_refused(
    own: jaxtrain.Experiment, trained: Train, tmp_path: Path, axes: dict[str, int]
) -> None:
    """It would train nothing; and nothing is touched, compiled or said to be done."""
    trained(own, steps=5)
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    refused = r"run is at step 5 already, and this run is to end at step 3.*ask for 5 steps or more"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "compile_step", lambda *_: pytest.fail("a step was compiled"))
        with pytest.raises(ValueError, match=refused):
            trained(own, steps=3, axes=axes)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == kept
    assert trained(own, axes=axes).steps == STEPS


@pytest.mark.parametrize("name", ["5", "5.damaged"])
def test_a_run_that_saves_nothing_does_not_begin_over_one_that_did(
    own: jaxtrain.Experiment, tmp_path: Path, name: str
) -> None:
    run, mesh = tmp_path / "run", jaxtrain.mesh_from_axes(data=1)
    (run / "checkpoints" / name).mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"experiment": config_of(own)}))
    (run / "metrics.jsonl").write_text('{"step": 5, "loss": 1.0}\n')
    kept = {p: p.stat().st_mtime_ns for p in run.rglob("*")}
    told = rf"run holds (step )?{name} in checkpoints/.*is None.*SavePolicy.*in another --run-dir"
    with pytest.raises(ValueError, match=told):
        jaxtrain.train(own, mesh, run_dir=run, settings=["checkpoints=None"], steps=2)
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*")} == kept


def test_another_experiment_is_refused_with_the_fields_that_differ(
    own: jaxtrain.Experiment, trained: Train, tmp_path: Path
) -> None:
    trained(own, steps=1)
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")}
    other = replace(own, batch=4, optimizer=replace(own.optimizer, momentum=0.5))
    with pytest.raises(ValueError, match="another experiment") as refused:
        trained(other)
    assert "experiment.batch was 8, now 4" in str(refused.value)
    assert "experiment.optimizer.momentum was 0.0, now 0.5" in str(refused.value)
    assert "seed" not in str(refused.value), "only what differs"
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("*")} == kept


def test_what_is_not_learned_may_change_between_starts(
    own: jaxtrain.Experiment, trained: Train
) -> None:
    trained(own, steps=2)
    changed = replace(
        own,
        evaluation=jaxtrain.Evaluation(every=2, batches=1, final_batches=1),
        logging=jaxtrain.Logging(every=5, tensorboard=False),
        checkpoints=jaxtrain.SavePolicy(every=3),
        execution=jaxtrain.Execution(mode="gspmd"),
        sharding=jaxtrain.zero1(),
    )
    assert trained(changed).steps == STEPS


def test_settings_replace_single_fields(
    own: jaxtrain.Experiment, trained: Train, tmp_path: Path
) -> None:
    result = trained(own, settings=["optimizer.learning_rate=0.25", "batch=4", "seed=7"], steps=1)
    assert result.history[0]["learning_rate"] == 0.25
    assert result.history[0]["weight"] == 4 * 8
    config = json.loads((tmp_path / "run" / "config.json").read_text())["experiment"]
    assert (config["batch"], config["seed"]) == (4, 7)
    assert trained(own, name="plain", steps=1).loss != result.loss
    with pytest.raises(ValueError, match=r"no field 'learning_rat'.*did you mean 'learning_rate'"):
        trained(own, name="typo", settings=["optimizer.learning_rat=1"])
    assert not (tmp_path / "typo").exists()


def test_a_batch_ramp_grows_on_time_and_resumes_inside(
    own: jaxtrain.Experiment, trained: Train
) -> None:
    experiment = replace(own, batch=BatchRamp(start=2, end=6, increment=2, steps=2))
    whole = trained(experiment, name="whole")
    assert [line["weight"] / 8 for line in whole.history] == [2, 2, 4, 4, 6, 6]
    trained(experiment, steps=3)
    rest = trained(experiment)
    assert losses(rest) == {k: v for k, v in losses(whole).items() if k > 3}
    assert_same_state(rest, whole)


@pytest.mark.parametrize(
    ("model", "axes"),
    [
        ("own", {"data": 4}),
        pytest.param("decoder", {"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_evaluation_does_not_depend_on_the_mesh(
    request: pytest.FixtureRequest,
    trained: Train,
    model: str,
    axes: dict[str, int],
    tmp_path: Path,
) -> None:
    plain = request.getfixturevalue(model)
    plain = replace(plain, data=replace(plain.data, isolate_documents=True))
    if model == "decoder":  # on text, whose tokens stand for bytes
        for name in ("train", "more", "held"):
            (tmp_path / f"{name}.txt").write_text("the quick brown fox jumps over it. " * 64)
        held = str(tmp_path / "held.txt")
        source = jaxtrain.TextFiles(str(tmp_path / "*.txt"), held_out_patterns=held)
        plain = replace(
            plain,
            model=replace(plain.model, vocab=257, vocab_multiple=4),
            data=jaxtrain.TextData(source, jaxtrain.data.ByteTokenizer(), seq=8),
        )
    evaluated = replace(plain, evaluation=jaxtrain.Evaluation(every=2, batches=3, final_batches=3))
    alone = trained(evaluated, name=None, axes={"data": 1}, steps=4)
    spread = trained(evaluated, name=None, axes=axes, steps=4)
    assert spread.evaluation == pytest.approx(alone.evaluation, rel=1e-5)
    assert ("bits_per_byte" in alone.evaluation) == (model == "decoder")


def test_evaluation_disturbs_nothing(own: jaxtrain.Experiment, trained: Train) -> None:
    often = jaxtrain.Evaluation(every=2, batches=1, final_batches=1)
    evaluated = trained(replace(own, evaluation=often), name=None)
    quiet = trained(own, name=None)
    assert losses(quiet) == losses(evaluated)
    assert_same_state(quiet, evaluated)
    assert quiet.evaluation == {}


def test_without_a_run_directory_nothing_is_written(
    own: jaxtrain.Experiment, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = trained(own, name=None)
    assert result.steps == STEPS and result.run_dir is None
    assert list(tmp_path.rglob("*")) == []
    with pytest.raises(KeyboardInterrupt):
        trained(own, name=None, callbacks=[Asking(after(1, interrupt))])
    assert trained(own, name=None, callbacks=[Asking(after(2, lambda: True))]).steps == 2


@pytest.mark.parametrize("field", ["batch", "vocab"])
def test_what_does_not_fit_is_refused_before_anything_is_written(
    field: str, decoder: jaxtrain.Experiment, trained: Train, tmp_path: Path
) -> None:
    wrong = {
        "batch": (replace(decoder, batch=9), "batch=9 .* use batch=8 or 10"),
        "vocab": (replace(decoder, model=replace(decoder.model, vocab=15)), "use vocab=16"),
    }
    experiment, message = wrong[field]
    with pytest.raises(ValueError, match=message):
        trained(experiment)
    assert not (tmp_path / "run").exists()


class Slow(nnx.Module):
    """Every step takes 50 ms, whatever the machine."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.bias = nnx.Param(jax.random.normal(rngs.params(), (16,)), axes=("vocab",))

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        def wait(x: Any) -> Any:
            time.sleep(0.05)
            return x

        weights = batch["weights"]
        waited = jax.pure_callback(wait, jax.ShapeDtypeStruct((), weights.dtype), weights[0, 0])
        lost = -jax.nn.log_softmax(self.bias[...])[batch["targets"]]
        return jnp.sum(lost * weights) + 0 * waited, jnp.sum(weights)


def slow(rngs: nnx.Rngs) -> Slow:
    return Slow(rngs)


def test_the_time_of_a_step_is_not_hidden_by_its_save(
    own: jaxtrain.Experiment, trained: Train
) -> None:
    """A save waits for its step; the clock is stopped for the rest of it only."""
    saved = replace(own, model=slow, checkpoints=jaxtrain.SavePolicy(every=1, keep=1), steps=5)
    result = trained(saved, steps=5)
    assert all(step["step_s"] >= 0.04 for step in result.history[1:])


def test_evaluations_are_in_no_steps_time(
    own: jaxtrain.Experiment, trained: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linger(*_: Any, **__: Any) -> dict[str, float]:
        time.sleep(0.5)
        return {"eval_loss": 1.0}

    monkeypatch.setattr(Evaluator, "__call__", linger)
    often = replace(own, evaluation=jaxtrain.Evaluation(every=1), steps=5)
    result = trained(often, name=None, steps=5)
    assert sorted(step["step_s"] for step in result.history[1:])[1] < 0.4


def test_held_out_batches_run_one_at_a_time(
    decoder: jaxtrain.Experiment, opened: Any, tmp_path: Path
) -> None:
    """Simulated devices hang when independent programs with collectives run side by side."""
    opened_session = opened(decoder, data=2)
    evaluator = Evaluator(opened_session.assembly, opened_session.mesh, cache_dir=tmp_path)
    evaluator.open()
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda i, x: jnp.sin(x @ x), x).sum())
    right, results = evaluator._step, []

    class Step:
        """In the place of the program."""

        def lower(self, *arguments: Any) -> Step:
            return self

        def compile(self) -> Step:
            return self

        def __call__(self, *arguments: Any) -> Any:
            assert all(each.is_ready() for each in results), "a batch before this one still runs"
            sums = right(*arguments)
            results.append(sums.loss + 0 * slow(jnp.ones((300, 300))))
            return sums._replace(loss=results[-1])

    evaluator._step = Step()
    evaluator(opened_session.state, batches=4)
    assert len(results) == 4


def test_the_last_step_is_in_the_files_however_seldom_one_logs(
    own: jaxtrain.Experiment, trained: Train, tmp_path: Path
) -> None:
    quiet = replace(own, logging=jaxtrain.Logging(every=100, tensorboard=False))
    quiet = replace(quiet, checkpoints=jaxtrain.SavePolicy(every=100))
    assert trained(quiet, callbacks=[Asking(after(2, lambda: True))]).stopped
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2]
    whole = trained(quiet)
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3, STEPS]
    assert trained(quiet).loss == whole.loss, "of the last step, read back"


def test_lines_have_the_seconds_of_every_process(
    own: jaxtrain.Experiment, trained: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the pace has them, which is told how long rows were waited for."""
    waits: list[float] = []

    class Told(Pace):
        def add(self, own_s: float, step_s: float, data_s: float) -> None:
            waits.append(data_s)

        def of_each(self) -> dict[str, list[float]]:
            return {"process_own_s": [0.5, float(len(waits))]}

    monkeypatch.setattr(loop, "Pace", Told)
    result = trained(replace(own, logging=jaxtrain.Logging(every=2, tensorboard=False)))
    found = [line["process_own_s"] for line in lines(tmp_path / "run")]
    assert [own_s for own_s, _ in found] == [0.5] * len(found) and len(found) == 4
    assert "process_own_s" not in result.history[0], "a long run's memory is for what is short"
    assert 0 < waits[0] <= waits[-1] and len(waits) == STEPS
