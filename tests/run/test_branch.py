"""A branch: another run's whole state at a step, its place in the data, its own experiment."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxtrain
from jaxtrain import FineTuning, FromRun, Health, LossSpikes, cli
from jaxtrain.checkpoint import committed_steps
from jaxtrain.compression import Compressed, Int8
from jaxtrain.data import BatchRamp, BigramChain
from jaxtrain.optim.schedule import Constant, WarmupStableDecay
from jaxtrain.run.saving import Saving
from jaxtrain.scores import ScoreFunction
from jaxtrain.weights.run_step import run_and_step
from tests.tiny import BATCH, SEQ, VOCAB, Table


def adamw(rate=3e-2):
    return jaxtrain.AdamW(rate if not isinstance(rate, float) else Constant(rate))


class Wider(nnx.Module):
    """`Table` with one more dim."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inward = nnx.Param(jnp.ones((VOCAB, 9)), axes=("vocab", "embed"))
        self.outward = nnx.Param(jnp.ones((9, VOCAB)), axes=("embed", "vocab"))

    loss = Table.loss


def wider(rngs: nnx.Rngs) -> Wider:
    return Wider(rngs)


@pytest.fixture
def base(own) -> jaxtrain.Experiment:
    """Six steps, each second one saved."""
    return replace(
        own,
        optimizer=adamw(),
        steps=6,
        ema_decay=0.9,
        checkpoints=jaxtrain.SavePolicy(every=2, keep=9),
    )


@pytest.fixture
def source(base, tmp_path: Path) -> Path:
    """The directory of a finished run of `base`."""
    run = tmp_path / "base"
    jaxtrain.train(base, "cpu_1", run_dir=run, stream=io.StringIO())
    return run


def files_of(run: Path) -> dict[str, bytes]:
    return {str(p.relative_to(run)): p.read_bytes() for p in run.rglob("*") if p.is_file()}


def trained(experiment, run: Path | None, mesh="cpu_1", **more):
    told = io.StringIO()
    result = jaxtrain.train(experiment, mesh, run_dir=run, stream=told, **more)
    return result, told.getvalue()


def losses(result) -> list[float]:
    return [line["loss"] for line in result.history]


READ: list[list[int]] = []
"""Row numbers of each batch, in the order in which it was read."""


@dataclass(frozen=True)
class Noted:
    """A corpus whose reads are noted in `READ`."""

    corpus: BigramChain

    def open(self, split: str, *, seed: int, cache_dir: Path):
        dataset = self.corpus.open(split, seed=seed, cache_dir=cache_dir)
        read = dataset.rows

        def rows(indices: np.ndarray) -> dict[str, np.ndarray]:
            if len(indices) >= BATCH // 2:  # fewer are read to see what a row has
                READ.append(np.asarray(indices).tolist())
            return read(indices)

        dataset.rows = rows
        return dataset


def batches_of(act) -> list[list[int]]:
    """Row numbers of the batches of a run, and of those that were read ahead."""
    READ.clear()
    act()
    return list(READ)


def counted(begin: int, *sizes: int) -> list[list[int]]:
    """Row numbers of consecutive batches of these sizes."""
    ends = np.cumsum([begin, *sizes]).tolist()
    return [list(range(a, b)) for a, b in pairwise(ends)]


@pytest.mark.parametrize("ramp", [False, True], ids=["constant", "ramp and skip"])
def test_a_branch_with_more_steps_is_the_longer_run(base, tmp_path: Path, ramp: bool) -> None:
    if ramp:
        skips = Health(skip_batches=((1, 2), (5, 1)))
        base = replace(
            base,
            batch=BatchRamp(start=4, end=8, increment=4, steps=3),
            execution=jaxtrain.Execution(health=skips),
        )
    longer = replace(base, steps=8)
    straight, _ = trained(longer, None)
    trained(base, tmp_path / "base")
    before = files_of(tmp_path / "base")
    branch, told = trained(longer, tmp_path / "branch", from_run=f"{tmp_path / 'base'}@4")
    assert losses(branch) == losses(straight)[4:]
    assert [line["step"] for line in branch.history] == [5, 6, 7, 8]
    for ours, theirs in zip(
        jax.tree.leaves(branch.session.state), jax.tree.leaves(straight.session.state), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    assert files_of(tmp_path / "base") == before
    assert f"branch of step 4 of {tmp_path / 'base'}: its whole state is kept" in told
    assert "what differs: steps was 6, now 8\n" in told and "NOTE" not in told
    assert f"branching off after step 4 of {tmp_path / 'base'}, " in told


def test_the_newest_step_on_another_mesh(base, source: Path, tmp_path: Path) -> None:
    longer = replace(base, steps=8)
    straight, _ = trained(longer, None)
    mesh = jaxtrain.mesh_from_axes(fsdp=2)
    branch, _ = trained(longer, tmp_path / "branch", mesh, from_run=source)
    assert [line["step"] for line in branch.history] == [7, 8]
    np.testing.assert_allclose(losses(branch), losses(straight)[6:], rtol=1e-5)


def test_several_decays_from_one_plateau(base, tmp_path: Path) -> None:
    def decaying(steps: int, decay: int) -> jaxtrain.Experiment:
        return replace(base, optimizer=adamw(WarmupStableDecay(3e-2, decay, 1)), steps=steps)

    plateau = tmp_path / "plateau"
    trained(decaying(100, 2), plateau, steps=6)
    for steps, decay in ((6, 2), (8, 4), (8, 2)):
        whole, _ = trained(decaying(steps, decay), None)
        run = tmp_path / f"{steps}, {decay}"
        branch, told = trained(decaying(steps, decay), run, from_run=f"{plateau}@4")
        assert losses(branch) == losses(whole)[4:], (steps, decay)
        assert ("optimizer.learning_rate.decay was 2, now 4" in told) == (decay == 4)


def test_it_has_a_save_of_its_own_at_once_and_needs_the_other_no_more(
    base, source: Path, tmp_path: Path
) -> None:
    longer, run = replace(base, steps=10), tmp_path / "branch"
    straight, _ = trained(longer, None)
    trained(longer, run, from_run=f"{source}@4", steps=5)
    assert committed_steps(run / "checkpoints") == [4, 5]
    source.rename(tmp_path / "moved")
    resumed, told = trained(longer, run, steps=7, from_run=f"{source}@4")  # the same command
    assert "resuming at step 5, " in told
    assert losses(resumed) == losses(straight)[5:7]
    resumed, _ = trained(longer, run, from_run=source, steps=8)  # whose newest it was not
    again, _ = trained(longer, run)
    assert losses(resumed) + losses(again) == losses(straight)[7:]
    stored = json.loads((run / "config.json").read_text())["branch"]
    assert len(stored.pop("digest")) == 64
    assert stored == {"run": str(source), "step": 4, "differs": {"steps": [6, 10]}}


def test_a_branch_in_which_nothing_differs(base, tmp_path: Path) -> None:
    """Its record is whole too when the other run has gone."""
    source, run = tmp_path / "base", tmp_path / "branch"
    whole, _ = trained(base, None)
    trained(base, source, steps=2)
    told = trained(base, run, steps=3, from_run=source)[1]
    assert "what differs: no field\n" in told
    shutil.rmtree(source)
    went_on, _ = trained(base, run)
    assert losses(went_on) == losses(whole)[3:]


def test_all_fields_that_differ_are_told_an_object_as_one(base, source, tmp_path: Path) -> None:
    changed = replace(
        base,
        steps=9,
        microbatches=2,
        optimizer=jaxtrain.AdamW(WarmupStableDecay(3e-2, 2), b1=0.8),
        logging=jaxtrain.Logging(every=3, tensorboard=False),
    )
    told = trained(changed, tmp_path / "branch", from_run=f"{source}@4")[1]
    listed = told.split("what differs: ")[1].split("\n")[0].split("; ")
    assert listed == [
        "logging.every was 1, now 3",
        "microbatches was 1, now 2",
        "optimizer.b1 was 0.9, now 0.8",
        'optimizer.learning_rate was "Constant", now "WarmupStableDecay"',
        "steps was 6, now 9",
    ]


def test_sums_compressed_on_another_mesh_go_on(base, tmp_path: Path) -> None:
    """Their errors are dealt out anew."""
    execution = jaxtrain.Execution(mode="explicit", reducer=Compressed(Int8(block=4)), small_leaf=0)
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=8))
    model = jaxtrain.DecoderConfig(vocab=VOCAB, embed=8, layers=1, period=(block,), tied=True)
    base = replace(base, model=model, execution=execution, ema_decay=None)
    trained(base, tmp_path / "base", jaxtrain.mesh_from_axes(data=2))
    four, run = jaxtrain.mesh_from_axes(data=4), tmp_path / "branch"
    branch, _ = trained(replace(base, steps=7), run, four, from_run=tmp_path / "base")
    resumed, _ = trained(base, tmp_path / "base", four)
    assert [line["step"] for line in branch.history] == [7] and resumed.session.start == 6


def test_one_that_has_saved_nothing_begins_there_again(base, source, tmp_path: Path) -> None:
    longer, run = replace(base, steps=8, checkpoints=None), tmp_path / "branch"
    first, _ = trained(longer, run, from_run=f"{source}@4")
    again, told = trained(longer, run)
    assert losses(first) == losses(again) and len(again.history) == 4
    assert "branching off after step 4" in told
    shutil.rmtree(source)
    with pytest.raises(ValueError, match="has no committed checkpoint"):
        trained(longer, run)
    with pytest.raises(ValueError, match=r"began at .*@4, and --from is"):
        trained(longer, run, from_run=f"{source}@2")
    with pytest.raises(ValueError, match=r"began at .*@4, and --from is"):
        trained(longer, run, from_run=tmp_path)
    trained(replace(base, optimizer=adamw(1e-2)), source)  # the same steps of another run
    with pytest.raises(ValueError, match="is another state than the one that this run began with"):
        trained(longer, run)


def test_rows_go_on_where_the_other_run_was(base, tmp_path: Path) -> None:
    """With other batches, after a resume, and in a branch of a branch."""
    base, told = replace(base, data=Noted(base.data)), {}
    source, run = tmp_path / "base", tmp_path / "half"
    half = replace(base, batch=BATCH // 2, steps=9)
    rises = replace(base, batch=BatchRamp(start=4, end=8, increment=4, steps=7), steps=9)

    def train(name, *arguments, **more):
        return lambda: told.update({name: trained(*arguments, **more)[1]})

    read = batches_of(train("base", base, source))
    assert read[:6] == counted(0, *[8] * 6)
    read = batches_of(train("half", half, run, from_run=f"{source}@4", steps=6))
    assert read[:2] == counted(32, 4, 4)
    assert f"data: goes on at row 32, where step 4 of {source} was\n" in told["half"]
    assert batches_of(train("resumed", half, run, steps=8))[:2] == counted(40, 4, 4)
    again = tmp_path / "again"
    read = batches_of(train("again", rises, again, from_run=f"{run}@6"))
    assert read[:3] == counted(40, 4, 8, 8)
    assert f"data: goes on at row 40, where step 6 of {run} was\n" in told["again"]


def test_other_data_begins_at_its_first_row(base, source: Path, tmp_path: Path) -> None:
    corpus = BigramChain(vocab=VOCAB, seq=SEQ, successors=3)
    other, told = replace(base, data=Noted(corpus), steps=9), ""
    run = tmp_path / "other"

    def train() -> None:
        nonlocal told
        told = trained(other, run, from_run=f"{source}@4", steps=6)[1]

    assert batches_of(train)[:2] == counted(0, 8, 8)
    assert f"data: not that of step 4 of {source}, by its digest; begins at row 0\n" in told
    assert batches_of(lambda: trained(other, run))[:3] == counted(16, 8, 8, 8)


def test_a_skip_at_the_step_is_in_its_own_batches(base, tmp_path: Path) -> None:
    """Not in those of the other run, nor for ever."""
    skips = Health(skip_batches=((1, 1), (4, 1)))
    base = replace(base, data=Noted(base.data), execution=jaxtrain.Execution(health=skips))
    source, run = tmp_path / "base", tmp_path / "half"
    read = batches_of(lambda: trained(base, source))
    assert read[:5] == [*counted(0, 8), *counted(16, 8, 8, 8), *counted(48, 8)]
    half = replace(base, batch=4, steps=9)
    read = batches_of(lambda: trained(half, run, from_run=f"{source}@4", steps=5))
    assert read[:1] == counted(44, 4)  # 40 come next, of which 4 are skipped
    other = replace(half, data=Noted(BigramChain(vocab=VOCAB, seq=SEQ, successors=3)))
    read = batches_of(lambda: trained(other, tmp_path / "other", from_run=f"{source}@4", steps=6))
    assert read[:2] == counted(4, 4, 4)
    longer = replace(base, data=Noted(BigramChain(vocab=VOCAB, seq=2 * SEQ, successors=2)))
    longer = replace(longer, steps=8)
    longer = replace(longer, execution=jaxtrain.Execution(health=Health(skip_batches=((1, 1),))))
    read = batches_of(lambda: trained(longer, tmp_path / "seq", from_run=f"{source}@4"))
    assert read[:1] == counted(40, 8)  # the class does not say how long its rows are
    plain = replace(longer, data=longer.data.corpus)
    first = replace(plain, data=base.data.corpus, steps=6)
    trained(first, tmp_path / "plain")
    told = trained(plain, None, from_run=f"{tmp_path / 'plain'}@4")[1]
    assert "by its digest; begins at row 0\n" in told  # rows of another length


def test_what_was_seen_of_the_loss_goes_on_with_the_same_data(
    base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health(spikes=LossSpikes(window=8, back=2))
    watched = replace(base, execution=jaxtrain.Execution(health=health))
    trained(watched, tmp_path / "base")
    other = replace(watched, data=BigramChain(vocab=VOCAB, seq=SEQ, successors=3))
    seen, savings, begin = [], [], Saving.begin

    def keep(saving: Saving) -> None:
        seen.append(len(saving.watch.losses))
        savings.append(saving)
        begin(saving)

    monkeypatch.setattr(Saving, "begin", keep)
    for number, experiment in enumerate((watched, other)):
        run = tmp_path / f"{number}"
        trained(experiment, run, from_run=f"{tmp_path / 'base'}@4")
    assert seen == [4, 0]
    for saving, counted_losses in zip(savings, (6, 2), strict=True):  # of its own step 6
        assert len(saving.watch_at(6).losses) == counted_losses


def test_what_does_not_fit_is_refused_with_each_leaf(
    base, decoder, source: Path, tmp_path: Path
) -> None:
    run = tmp_path / "branch"
    cases = [
        (
            dict(optimizer=jaxtrain.SGD(0.1)),
            ['optimizer was "AdamW", now "SGD"', "and 4 more leaves of the optimizer"],
        ),
        (dict(ema_decay=None), ["ema.outward: float32[8,16] there, not kept here"]),
        (dict(precision=jaxtrain.fp16), ["loss_scale.scale: not there, expected float32[]"]),
        (
            dict(model=decoder.model),
            ["params.inward: float32[16,8] there, not kept", "not there, "],
        ),
        (dict(model=wider), ["params.inward: float32[16,8] there, expected float32[16,9]"]),
    ]
    for change, texts in cases:
        other = replace(base, steps=8, **change)
        with pytest.raises(ValueError, match="cannot go on in this experiment") as refused:
            trained(other, run, from_run=f"{source}@4")
        for text in texts:
            assert text in str(refused.value), refused.value
        with pytest.raises(ValueError) as by_check:
            jaxtrain.check(other, "cpu_1", from_run=f"{source}@4")
        assert str(by_check.value) == str(refused.value)
        weights_alone = f"FromRun({str(source)!r}, step=4)" in str(refused.value)
        assert weights_alone == ("model" not in change)
    assert not run.exists()


def test_a_branch_goes_on_from_a_run_that_was_moved(base, source: Path, tmp_path: Path) -> None:
    """Before it has a save of its own, too; another run in that place is refused."""
    longer, run = replace(base, steps=8), tmp_path / "branch"
    unsaved = replace(longer, checkpoints=None)
    told = trained(unsaved, run, from_run=f"{source}@4")[1]
    elsewhere = source.rename(tmp_path / "elsewhere")
    moved, again = trained(unsaved, run, from_run=f"{elsewhere}@4")
    assert "branch of step 4" in told and f"branch of step 4 of {elsewhere}" in again
    assert losses(trained(unsaved, run)[0]) == losses(moved), "its place is recorded"
    trained(replace(base, seed=1), source)
    with pytest.raises(ValueError, match=r"began at .*elsewhere@4, and --from is"):
        trained(unsaved, run, from_run=f"{source}@4")
    with pytest.raises(ValueError, match=r"began at .*elsewhere@4, and --from is"):
        trained(unsaved, run, from_run=tmp_path / "nowhere")


def test_check_says_what_a_branch_keeps_with_all_that_is_wrong(base, source: Path) -> None:
    longer = replace(base, steps=8)
    report = jaxtrain.check(longer, "cpu_1", from_run=source)
    says = (
        f"branch of step 6 of {source}: its whole state is kept; what differs: steps was 6, now 8"
    )
    assert report.branch == says == report.as_json()["branch"]
    assert says in report.summary().splitlines()
    report = jaxtrain.check(longer, "cpu_1")
    assert "branch" not in report.as_json() and "branch" not in report.summary()
    late = replace(longer, execution=jaxtrain.Execution(health=Health(skip_batches=((3, 1),))))
    with pytest.raises(ValueError, match="skip_batches"):
        jaxtrain.check(late, "cpu_1", from_run=source)
    with pytest.raises(ValueError, match=r"2 things to mend") as refused:
        jaxtrain.check(replace(longer, microbatches=3), "cpu_1", from_run=f"{source}@3")
    assert "from_run (--from): " in str(refused.value) and "has no step 3" in str(refused.value)
    wrong = replace(longer, optimizer=jaxtrain.SGD(0.1), microbatches=3)
    with pytest.raises(ValueError, match=r"microbatches=3") as refused:
        jaxtrain.check(wrong, "cpu_1", from_run=source)
    assert "cannot go on in this experiment" in str(refused.value)


def test_weights_that_would_not_be_used_are_refused(base, source: Path, tmp_path: Path) -> None:
    start = FineTuning(FromRun(source, step=2))
    tuned = replace(base, fine_tuning=start, steps=8)
    with pytest.raises(ValueError, match=r"fine_tuning\.start=.* would not be used"):
        trained(tuned, tmp_path / "branch", from_run=f"{source}@4")
    trained(replace(tuned, steps=6), tmp_path / "tuned")
    branch, _ = trained(tuned, tmp_path / "branch", from_run=tmp_path / "tuned")
    assert [line["step"] for line in branch.history] == [7, 8]  # of a run that began so
    with pytest.raises(ValueError, match=r"holds another experiment: experiment\.fine_tuning"):
        trained(replace(tuned, fine_tuning=FineTuning(FromRun(tmp_path))), tmp_path / "tuned")


def doubled(x: jax.Array) -> jax.Array:
    return 2 * jax.nn.silu(x)


def test_a_model_of_the_same_shapes_that_computes_something_else(decoder, tmp_path: Path) -> None:
    experiment = replace(decoder, steps=4, checkpoints=jaxtrain.SavePolicy(every=2))
    trained(experiment, tmp_path / "base", steps=2)
    block = decoder.model.period[0]
    other = replace(block, mlp=replace(block.mlp, activation=jax.nn.relu))
    changed = replace(experiment, model=replace(decoder.model, period=(other,)))
    with pytest.raises(ValueError, match=r"model: block\.mlp\.activation is relu, there silu"):
        trained(changed, tmp_path / "branch", from_run=tmp_path / "base")
    own = replace(block, mlp=replace(block.mlp, activation=doubled))
    experiment = replace(experiment, model=replace(decoder.model, period=(own,)))
    trained(experiment, tmp_path / "own", steps=2)
    branch, _ = trained(experiment, None, from_run=tmp_path / "own")  # a function of one's own
    assert len(branch.history) == 2
    dropout = replace(changed, model=replace(decoder.model, dropout=0.5))
    assert "model.dropout was 0.0, now 0.5" in trained(dropout, None, from_run=tmp_path / "base")[1]


@pytest.mark.parametrize(
    ("asked", "steps", "text"),
    [
        ("base@5", 8, "has no step 5; saved there: 2, 4, 6"),
        ("base@4", 4, "is to end at step 4: nothing would be trained; ask for more than 4 steps"),
        ("base", 6, "is to end at step 6: nothing would be trained"),
        ("nowhere", 8, "there is no directory "),
        ("branch", 8, "is a run of its own, not in "),
        ("link", 8, "is a run of its own, not in "),
        ("base@x", 8, "has no step behind the @; give RUN or RUN@STEP"),
    ],
)
def test_a_start_that_is_none_is_refused(
    base, source: Path, tmp_path: Path, asked: str, steps: int, text: str
) -> None:
    run = tmp_path / "branch"
    (tmp_path / "link").symlink_to(run)
    for more in ({}, {"steps": 4}) if asked == "base@4" else ({},):
        with pytest.raises(ValueError) as refused:
            trained(replace(base, steps=steps + len(more)), run, from_run=tmp_path / asked, **more)
        assert text in str(refused.value)
    if asked not in ("branch", "link"):  # `check` asks for no directory
        with pytest.raises(ValueError) as refused:
            jaxtrain.check(replace(base, steps=steps), "cpu_1", from_run=tmp_path / asked)
        assert text in str(refused.value)
    assert not run.exists()


@dataclass(frozen=True)
class Fading(ScoreFunction):
    by: float = 0.5

    def __call__(self, score, head, query, key):
        return score - self.by * (query - key)


def test_a_model_with_an_object_of_one_s_own_in_it(decoder, tmp_path: Path) -> None:
    """No module is imported for its run: leaves are compared, and fields that differ are told."""

    def of(scores: ScoreFunction, **more) -> jaxtrain.Experiment:
        block = decoder.model.period[0]
        block = replace(block, attention=replace(block.attention, scores=scores))
        model = replace(decoder.model, period=(block,), **more)
        saves = jaxtrain.SavePolicy(every=2)
        return replace(decoder, model=model, steps=4, checkpoints=saves)

    trained(of(Fading()), tmp_path / "base", steps=2)
    told = trained(of(Fading(0.25)), None, from_run=tmp_path / "base")[1]
    assert "scores.by was 0.5, now 0.25" in told
    wider = of(Fading(), embed=2 * decoder.model.embed)
    with pytest.raises(
        ValueError, match=r"(?s)model\.embed was .*params\.embedding: .* there, expected"
    ):
        jaxtrain.check(wider, "cpu_1", from_run=tmp_path / "base")
    start = replace(of(Fading(0.25)), fine_tuning=FineTuning(FromRun(tmp_path / "base")))
    with pytest.raises(ValueError, match=r"is not of this library; .* give trust="):
        trained(start, None)


def test_what_is_no_text_of_a_run_is_refused(base, source: Path, monkeypatch) -> None:
    for asked in ("", 4):
        with pytest.raises(ValueError, match="is no run; give RUN or RUN@STEP"):
            trained(base, None, from_run=asked)
    monkeypatch.chdir(source.parent)
    (source.parent / "runs").mkdir()
    source.rename(source.parent / "runs" / "base")
    with pytest.raises(ValueError, match=r"no directory base; did you mean runs/base\?"):
        trained(base, None, from_run="base@4")


@pytest.mark.parametrize(
    "entry",
    [
        *("x", ["a"], {"run": 5}),
        {"run": "\x1b[2J", "step": 4, "digest": "", "differs": {}},
        {"run": "a", "step": 0, "digest": "", "differs": {}},
    ],
    ids=str,
)
def test_a_strange_record_is_refused_and_listed(base, source: Path, entry) -> None:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"branch": entry}))
    with pytest.raises(ValueError, match="does not say where a run began"):
        trained(base, source)
    (listed,) = jaxtrain.runs(source.parent).runs
    assert listed.state == "unreadable" and listed.problem.isprintable()


def test_a_run_that_is_no_branch_does_not_become_one(base, source: Path, tmp_path: Path) -> None:
    longer, run = replace(base, steps=8), tmp_path / "run"
    trained(longer, run, steps=1)
    with pytest.raises(ValueError, match="is no branch of another, and --from is") as refused:
        trained(longer, run, from_run=f"{source}@4")
    assert "leave --from out to go on with it, or begin anew by --fresh" in str(refused.value)
    branch, told = trained(longer, run, from_run=f"{source}@4", fresh=True)
    assert f"is kept in {run}.1" in told and branch.history[0]["step"] == 5
    fresh, _ = trained(longer, run, fresh=True)
    assert fresh.history[0]["step"] == 1  # and no branch any more
    assert "branch" not in json.loads((run / "config.json").read_text())


def test_runs_are_listed_with_where_they_began(base, source: Path, tmp_path: Path) -> None:
    trained(replace(base, seed=5), tmp_path / "between")  # it is not compared with that
    trained(replace(base, steps=8), tmp_path / "branch", from_run=f"{source}@4")
    listed = {run.path.name: run for run in jaxtrain.runs(tmp_path).runs}
    assert listed["branch"].branch == f"{source}@4" and listed["base"].branch is None
    assert listed["branch"].differs == (("steps", 8),)
    assert f"from {source}@4, steps=8" in str(jaxtrain.runs(tmp_path))
    assert listed["between"].differs == (("seed", 5),)
    assert jaxtrain.runs(tmp_path).as_json()["runs"][2]["branch"] == f"{source}@4"


def test_a_path_may_have_the_sign(tmp_path: Path) -> None:
    (tmp_path / "run@3").mkdir()
    assert run_and_step(tmp_path / "run@3") == (tmp_path / "run@3", None)
    assert run_and_step(f"{tmp_path}/run@3@5") == (tmp_path / "run@3", 5)
    assert run_and_step("run") == (Path("run"), None)
    assert run_and_step("run", 3) == run_and_step("run@3", 3) == run_and_step("run@3")
    with pytest.raises(ValueError, match=r"run@3 names another step than step=4; give one of them"):
        run_and_step("run@3", 4)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.py").write_text(
        "import jaxtrain\nfrom jaxtrain.data import BigramChain\nfrom tests.tiny import table\n"
        "def experiment():\n"
        "    return jaxtrain.Experiment(model=table, data=BigramChain(vocab=16, seq=8, "
        "successors=2), optimizer=jaxtrain.SGD(0.5), steps=4, batch=8, evaluation=None, "
        "logging=jaxtrain.Logging(tensorboard=False), checkpoints=jaxtrain.SavePolicy(every=2))\n"
    )
    assert cli.main(["train", "exp.py"]) == 0
    assert cli.main(["train", "exp.py", "--from", "runs/exp@2"]) == 2
    assert "give another --run-dir or --name" in capsys.readouterr().err
    more = ["--name", "longer", "--set", "steps=6"]
    assert cli.main(["train", "exp.py", "--from", "runs/exp@2", *more]) == 0
    assert "steps was 4, now 6" in capsys.readouterr().out
    checked = ["check", "exp.py", "--set", "steps=6", "--from"]
    assert cli.main([*checked, "runs/exp@2"]) == 0
    assert "branch of step 2 of " in capsys.readouterr().out
    assert cli.main([*checked, "runs/exp@3"]) == cli.REFUSED
    assert "has no step 3; saved there: 2, 4" in capsys.readouterr().err
    assert cli.main(["runs"]) == 0
    assert "from runs/exp@2, steps=6" in capsys.readouterr().out


def test_the_order_of_another_seed_is_told(base, source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words of a text. " * 400)
    data = jaxtrain.TextData(
        source=jaxtrain.TextFiles(str(tmp_path / "a.txt"), held_out=0.0),
        tokenizer=jaxtrain.data.ByteTokenizer(),
        seq=SEQ,
    )
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=1), jaxtrain.MlpConfig(hidden=4))
    model = jaxtrain.DecoderConfig(vocab=258, embed=4, layers=1, period=(block,), tied=True)
    text = replace(base, model=model, data=data, steps=4)
    run, cache = tmp_path / "text", tmp_path / "cache"
    trained(text, run, steps=2, cache_dir=cache)
    for seed, order in ((1, ", in the order of another seed\n"), (0, "\n")):
        told = trained(replace(text, seed=seed), None, from_run=run, cache_dir=cache)[1]
        assert f"data: goes on at row 16, where step 2 of {run} was{order}" in told
