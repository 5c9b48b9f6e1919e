"""The certificate: what it passes, what it fails, and that it skips nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.certify import Difference
from jaxtrain.certificate.layouts import LOOPS, MODES, PIPELINES, Layout, experiment_on, layouts
from jaxtrain.certificate.outcome import STEPS, Outcome, Program
from jaxtrain.certificate.shrink import shrink
from jaxtrain.experiment import load_experiment
from jaxtrain.mesh.compiler_options import KEEP_BARRIERS, quick_to_compile
from jaxtrain.mesh.mesh import mesh_from_axes
from jaxtrain.pipeline import tick
from jaxtrain.step.assembly import assemble, try_assemble
from jaxtrain.transformer.small import seq_of

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
PLAIN = Layout((("data", 1),)).reference()


def report(differences: list[Difference]) -> str:
    return "\n".join(map(str, differences))


def shown(layout: Layout) -> set[str]:
    """The mode, and in an explicit one the loop and the pipeline, which are ours there."""
    if layout.mode == "gspmd":
        return {layout.mode}
    return {layout.mode, layout.loop, layout.pipeline}


def chosen(every: list[Layout], count: int) -> list[Layout]:
    """Few fp32 layouts that show as many modes, and loops and pipelines in an explicit one, as they
    can: the one that shows the most of what is left, again and again."""
    fit = [x for x in every if x.precision == "fp32" and x.axes != (("data", 8),)]
    left, kept = {*MODES, *LOOPS, *PIPELINES}, []
    while len(kept) < count:
        best = max(fit, key=lambda layout: len(shown(layout) & left))
        kept.append(best)
        assert shown(best) & left, f"no layout shows {left}"
        left -= shown(best)
    return kept


def in_parts(every: list[Layout], parts: int) -> list[list[Layout]]:
    """Neighbours have references in common."""
    order = sorted(every, key=lambda layout: str(layout.reference()))
    return [order[len(order) * i // parts : len(order) * (i + 1) // parts] for i in range(parts)]


QUICK = layouts(8, "quick")[0]
CHOSEN = chosen(QUICK, 2)
PARTS = 40
STATE = 1e-4


def passes(some: list[Layout], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: (some, len(some)))
    found = [difference for difference, _ in certify.certify(EXPERIMENT)]
    assert [d.layout for d in found] == some
    assert all(d.passed for d in found), report(found)


@pytest.mark.parametrize("layout", CHOSEN, ids=str)
def test_layouts_equal_one_device(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    passes([layout], monkeypatch)


DROPPED = Layout(
    (("fsdp", 2), ("stage", 2), ("tensor", 2)),
    mode="explicit, ring",
    loop="scanned, prefetch, remat full",
    dropout=0.1,
    pipeline="GPipe, residuals",
    periods=4,
)


@pytest.mark.slow
def test_dropout_of_stages_that_keep_residuals_is_that_of_one_device(
    monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    """Beside permutes that are tied to products."""
    passes([DROPPED], monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.sampled(PARTS)
def test_quick_passes(part: int, monkeypatch: pytest.MonkeyPatch, remembered: None) -> None:
    passes(in_parts(QUICK, PARTS)[part], monkeypatch)


def test_the_parts_are_the_whole() -> None:
    parts = in_parts(QUICK, PARTS)
    assert sorted(map(str, chain(*parts))) == sorted(map(str, QUICK))


@pytest.mark.exhaustive
def test_all_passes(remembered: None) -> None:
    found = [difference for difference, _ in certify.certify(EXPERIMENT, which="all")]
    assert len(found) == layouts(8, "all")[1]
    assert all(d.passed for d in found), report(found)


# A mistake of the mesh alone that leaves every loss, or the first gradient, as it is.


def without_decay(experiment: jaxtrain.Experiment) -> jaxtrain.Experiment:
    return replace(experiment, optimizer=replace(experiment.optimizer, weight_decay=0.0))


Mistake = Callable[[pytest.MonkeyPatch, jaxtrain.Experiment], jaxtrain.Experiment]


def patched(name: str, function: Any) -> Mistake:
    def mistake(patch: pytest.MonkeyPatch, experiment: jaxtrain.Experiment) -> jaxtrain.Experiment:
        patch.setattr(name, function)
        return experiment

    return mistake


MISTAKES: dict[str, tuple[Mistake, str, set[str]]] = {
    "none": (lambda patch, e: e, "own", set()),
    "no weight decay": (lambda patch, e: without_decay(e), "own", {"state_rel"}),
    "averages frozen": (
        patched(
            "jaxtrain.step.train_step.updated_averages", lambda state, params, decay: state.ema
        ),
        "SGD, averages",
        {"state_rel", "eval_rel"},
    ),
    "evaluation without averages": (
        patched("jaxtrain.session.evaluate.averaged_params", lambda state: state.params),
        "SGD, averages",
        {"eval_rel"},
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_that_losses_do_not_show_is_seen(
    name: str, decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch, remembered: None
) -> None:
    mistake, optimizer, failing = MISTAKES[name]
    right = certify.program

    def program(experiment: jaxtrain.Experiment, layout: Layout, *_: Any) -> Program:
        if layout == layout.reference():
            return right(experiment, layout)

        def run(*given: Any) -> Outcome:
            with monkeypatch.context() as patch:
                return right(mistake(patch, experiment), layout)(*given)

        return run

    monkeypatch.setattr(certify, "program", program)
    layout = Layout((("data", 2),), microbatches=1, optimizer=optimizer)
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ([layout], 1))
    small = replace(decoder, optimizer=replace(decoder.optimizer, learning_rate=1e-3))
    ((found, _),) = certify.certify(small, full=True, stop_at_failure=True)
    assert found.passed == (not failing), str(found)
    errors = {k: getattr(found, k) for k in ("loss_rel", "grad_rel", "state_rel", "eval_rel")}
    assert failing <= {k for k, error in errors.items() if error > STATE}, str(found)
    assert found.loss_rel <= 1e-5 and found.grad_rel <= 1e-5, str(found)


# What the verdict rests on, with runs made up.

Change = Callable[[Any, Layout], Any]


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[Change], Iterator[Any]]:
    """certify() where every run has one outcome, but for what `change` does off the reference. The
    gradient of "b" is rounding."""
    rng = np.random.default_rng(0)
    init = {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=5)}
    grads = [{"a": rng.normal(size=(3, 4)), "b": np.full(5, 1e-7)} for _ in range(STEPS)]
    outcome = Outcome(
        init=init,
        losses=np.linspace(3, 2, STEPS),
        norms=np.ones(STEPS),
        grads=grads,
        params={k: v + 0.3 * rng.normal(size=v.shape) for k, v in init.items()},
        averages={k: v + 0.1 * rng.normal(size=v.shape) for k, v in init.items()},
        optimizer={f"[0].mu['{k}']": v for k, v in grads[0].items()} | {"[0].count": np.array(5)},
        eval_loss=2.5,
        routing=[{}] * STEPS,
    )

    def start(change: Change) -> Iterator[Any]:
        def program(experiment: Any, layout: Layout, *_: Any) -> Program:
            right = layout == layout.reference()
            return lambda *given: outcome if right else change(outcome, layout)

        monkeypatch.setattr(certify, "program", program)
        return certify.certify(EXPERIMENT)

    return start


def scaled(name: str, relative: float, *, at: int | None = None) -> Change:
    """All of a field, of gradients those of step `at` (None: of each), larger by that share."""

    def change(outcome: Outcome, layout: Layout) -> Outcome:
        value: Any = getattr(outcome, name)
        if name == "grads":
            value = [larger(g) if at in (None, step) else g for step, g in enumerate(value)]
        else:
            value = larger(value) if isinstance(value, dict) else value * (1 + relative)
        return outcome._replace(**{name: value})

    def larger(leaves: Any) -> Any:
        return {k: v * (1 + relative) for k, v in leaves.items()}

    return change


def moved(name: str, relative: float, leaf: str = "a") -> Change:
    """A leaf has moved further from where it was at first, by that share of its way."""

    def change(outcome: Outcome, layout: Layout) -> Outcome:
        leaves = getattr(outcome, name)
        further = leaves[leaf] + relative * (leaves[leaf] - outcome.init[leaf])
        return outcome._replace(**{name: {**leaves, leaf: further}})

    return change


def frozen(outcome: Outcome, layout: Layout) -> Outcome:
    return outcome._replace(averages=outcome.init)


def replaced(name: str, leaf: str, value: Any) -> Change:
    return lambda outcome, layout: outcome._replace(
        **{name: {**getattr(outcome, name), leaf: value}}
    )


FP32, BOTH = {"fp32"}, {"fp32", "bf16"}
CHANGES: dict[str, tuple[Change, set[str]]] = {
    "nothing": (lambda outcome, layout: outcome, set()),
    "loss within the bound": (scaled("losses", 9e-6), set()),
    "loss beyond": (scaled("losses", 1.1e-5), FP32),
    "gradient within the bound": (scaled("grads", -9e-6), set()),
    "gradient beyond": (scaled("grads", 1.1e-5), FP32),
    "gradient of the last step beyond": (scaled("grads", 1.1e-5, at=STEPS - 1), FP32),
    "gradient norm beyond": (scaled("norms", -1.1e-5), FP32),
    "gradient beyond what bf16 may": (scaled("grads", 3.1e-2), BOTH),
    "initial parameters by the last bit": (scaled("init", 2.0**-52), BOTH),
    "loss not a number": (scaled("losses", np.nan), BOTH),
    "gradients not a number": (scaled("grads", np.nan), BOTH),
    "loss infinite": (scaled("losses", np.inf), BOTH),
    "evaluation within the bound": (scaled("eval_loss", -9e-6), set()),
    "evaluation beyond": (scaled("eval_loss", 1.1e-5), FP32),
    "evaluation not a number": (scaled("eval_loss", np.nan), BOTH),
    "parameters' way within the bound": (moved("params", 0.9 * STATE), set()),
    "parameters' way beyond": (moved("params", 1.1 * STATE), FP32),
    "parameters' way beyond what bf16 may": (moved("params", 1.1e-1), BOTH),
    "parameters of a leaf without a gradient": (moved("params", 1.0, leaf="b"), set()),
    "parameters not a number": (moved("params", np.nan), BOTH),
    "averages' way within the bound": (moved("averages", 0.8 * STATE), set()),
    "averages' way beyond": (moved("averages", 1.1 * STATE), FP32),
    "averages frozen": (frozen, BOTH),
    "optimizer state within the bound": (scaled("optimizer", 0.9 * STATE), set()),
    "optimizer state beyond": (scaled("optimizer", 1.1 * STATE), FP32),
    "optimizer state of a leaf without a gradient": (
        replaced("optimizer", "[0].mu['b']", np.ones(5)),
        set(),
    ),
    "optimizer's count": (replaced("optimizer", "[0].count", np.array(4)), BOTH),
    "parameters by a rounding": (scaled("params", 2.0**-24), set()),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("name", CHANGES)
def test_a_difference_beyond_the_bound_fails_and_no_other(name: str, made_up: Any) -> None:
    change, failing = CHANGES[name]
    for difference, _certificate in made_up(change):
        assert difference.passed == (difference.layout.precision not in failing), str(difference)
    assert len(_certificate.differences) == _certificate.closed_count == len(layouts(8, "quick")[0])
    wanted = sum(d.layout.precision in failing for d in _certificate.differences)
    assert len(_certificate.failed) == wanted
    assert _certificate.as_json()["layouts"] == _certificate.closed_count


def test_one_wrong_element_of_one_leaf_is_named(made_up: Any) -> None:
    def change(outcome: Any, layout: Layout) -> Any:
        wrong = outcome.grads[0]["a"].copy()
        wrong[1, 2] += 1e-4 * np.abs(wrong).max()
        return outcome._replace(grads=[{**outcome.grads[0], "a": wrong}, *outcome.grads[1:]])

    difference, _ = next(made_up(change))
    assert difference.worst_leaf == "a"
    assert difference.grad_rel == pytest.approx(1e-4)
    assert not difference.passed
    assert "(a)" in str(difference)


@pytest.mark.parametrize(("name", "said"), [("params", "params a"), ("averages", "averages a")])
def test_the_worst_leaf_of_the_state_is_named(name: str, said: str, made_up: Any) -> None:
    difference, _ = next(made_up(moved(name, 0.25)))
    assert difference.worst_state == said
    assert difference.state_rel == pytest.approx(0.25)
    assert f"({said})" in str(difference)


@pytest.mark.parametrize("error", [ValueError, AttributeError, NotImplementedError])
def test_a_layout_that_does_not_run_has_failed_and_the_others_go_on(
    made_up: Any, error: type[Exception]
) -> None:
    def change(outcome: Any, layout: Layout) -> Any:
        if layout.sharding == "zero1":
            raise error("no such thing\nsecond line")
        return outcome

    certificate = list(made_up(change))[-1][1]
    assert {d.layout.sharding for d in certificate.failed} == {"zero1"}
    assert certificate.failed[0].error == f"{error.__name__}: no such thing second line"
    assert len(certificate.differences) == certificate.closed_count


def test_a_layout_that_fails_without_a_word_ends_no_certificate(made_up: Any) -> None:
    def change(outcome: Any, layout: Layout) -> Any:
        if layout.sharding == "zero1":
            raise AssertionError
        return outcome

    certificate = list(made_up(change))[-1][1]
    assert {d.error for d in certificate.failed} == {"AssertionError: "}
    assert len(certificate.differences) == certificate.closed_count


def test_programs_are_compiled_while_one_runs_and_run_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch, made_up: Any
) -> None:
    """In the order of the layouts, each after its reference, which is run once."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    results = made_up(lambda outcome, layout: outcome)
    make, running, compiled = certify.program, threading.Lock(), []
    ran: list[tuple[Layout, int]] = []

    def program(experiment: Any, layout: Layout, *_: Any) -> Program:
        compiled.append(layout)
        run = make(experiment, layout)

        def alone(*given: Any) -> Outcome:
            assert running.acquire(blocking=False), "two programs run at once"
            ran.append((layout, len(compiled)))
            outcome = run(*given)
            running.release()
            return outcome

        return alone

    monkeypatch.setattr(certify, "program", program)
    assert [difference.layout for difference, _ in results] == QUICK
    order = [layout for layout, _ in ran]
    assert [layout for layout in order if layout in QUICK] == QUICK
    assert len(order) == len(set(order)) == len(compiled)
    for layout in QUICK:
        assert order.index(layout.reference()) <= order.index(layout)
    ahead = [seen - at for at, (_, seen) in enumerate(ran)]
    assert 1 < max(ahead) <= 3, "a program runs, and at most two are compiled meanwhile"


def test_programs_are_compiled_quickly(
    decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the initial state, of a step and of an evaluation; with what every step is given."""
    asked = []
    compile = jax.stages.Lowered.compile

    def spy(lowered: Any, compiler_options: Any = None) -> Any:
        asked.append(compiler_options)
        return compile(lowered, compiler_options=compiler_options)

    quick = quick_to_compile(jax.devices()[0])
    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    certify.program(decoder, PLAIN)
    assert quick and asked == 3 * [{"xla_disable_hlo_passes": KEEP_BARRIERS, **quick}]


def test_collectives_that_may_be_mixed_up_fail_a_layout(
    decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the values are: in stages whose sends do not wait for those before them."""
    staged = Layout((("fsdp", 2), ("stage", 2)), loop="scanned, prefetch, remat full")
    staged = staged._replace(pipeline="1F1B", microbatches=2, periods=6)
    monkeypatch.setattr(tick, "after", lambda tree, done: tree)
    with pytest.raises(ValueError, match=r"does not wait for .*devices then mix them up"):
        certify.program(shrink(decoder, devices=4), staged)


def test_a_certificate_that_is_left_compiles_no_more(made_up: Any) -> None:
    results = made_up(lambda outcome, layout: outcome)
    next(results)
    results.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor-certify")]


def test_stop_at_failure_stops_there(made_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made_up(scaled("losses", 1.0))
    assert len(list(certify.certify(EXPERIMENT, stop_at_failure=True))) == 1


def test_a_skipped_layout_is_noticed(made_up: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    every, count = layouts(8, "quick")
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: (every[:-1], count))
    with pytest.raises(AssertionError, match="a layout was skipped"):
        list(made_up(lambda outcome, layout: outcome))


def test_a_users_own_model_is_refused(own: jaxtrain.Experiment) -> None:
    with pytest.raises(ValueError, match="models that describe themselves"):
        next(certify.certify(own))


@pytest.mark.parametrize("devices", [0, -2])
def test_no_devices_are_refused(devices: int) -> None:
    with pytest.raises(ValueError, match=f"devices={devices} must be a whole number of 1 or more"):
        next(certify.certify(EXPERIMENT, devices=devices))


@pytest.mark.parametrize(
    "devices", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (5, 6))]
)
def test_every_layout_of_any_count_of_devices_is_accepted(devices: int) -> None:
    small = shrink(load_experiment(EXPERIMENT), devices=devices)
    every, count = layouts(devices, "all")
    assert len(every) == count
    for layout in dict.fromkeys([*every, *(layout.reference() for layout in every)]):
        assemble(experiment_on(small, layout), mesh_from_axes(**dict(layout.axes)))


def test_rows_are_cut_by_every_layout_of_any_count_of_devices() -> None:
    """2 microbatches over all devices, and 4 over those of each of several stages."""
    experiment = load_experiment(EXPERIMENT)
    for devices in range(1, 25):
        batch = shrink(experiment, devices=devices).batch
        assert batch % (2 * devices) == 0
        for stages in (s for s in range(2, devices + 1) if devices % s == 0):
            assert batch % (4 * devices // stages) == 0, (devices, stages)


@pytest.mark.parametrize(("devices", "least_cut"), [(8, 1), (6, 1), (8, 8)])
def test_every_layout_of_a_mixture_with_a_capacity_is_accepted(
    devices: int, least_cut: int
) -> None:
    """No mesh cuts its routing groups, of several tokens each. ReLU, across the jump of whose
    derivative some value rounds, has a smooth one in its place."""
    path = Path(__file__).parents[2] / "experiments" / "switch_1_6t.py"
    switch = jaxtrain.load_experiment(path)
    positioned = replace(switch.model, learned_positions=switch.data.seq)
    small = shrink(replace(switch, model=positioned), devices=devices)
    activations = set()
    for layout in layouts(devices, "quick" if least_cut == 1 else "all", experts=True)[0]:
        if dict(layout.axes).get("context", 1) < least_cut:
            continue
        experiment = experiment_on(small, layout)
        spec = jaxtrain.mesh_from_axes(**dict(layout.axes))
        assert not try_assemble(experiment, spec)[1], layout
        (block,) = experiment.model.period
        assert block.mlp.capacity.routing_group > 1
        activations.add(block.mlp.activation)
    assert activations == {jax.nn.silu} and small.model.period[0].mlp.activation == jax.nn.relu


def test_dropout_of_a_layout_is_that_of_every_block(decoder: jaxtrain.Experiment) -> None:
    (block,) = decoder.model.period
    noisy = replace(block, dropout=0.3)
    model = replace(decoder.model, layers=3, prefix=(noisy,), period=(noisy,), suffix=(noisy,))
    found = experiment_on(replace(decoder, model=model), Layout((("data", 1),), dropout=0.1))
    assert [b.dropout for b in found.model.blocks] == [0.1, 0.1, 0.1]
    assert found.model.dropout == 0.1


@pytest.mark.parametrize("devices", [1, 4, 6, 8])
def test_shrinking_keeps_the_features(decoder: jaxtrain.Experiment, devices: int) -> None:
    block = jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=8, kv_heads=2, window=64, softcap=20.0, qkv_bias=True),
        jaxtrain.MlpConfig(hidden=512, gated=False, bias=True),
    )
    wide = replace(block, attention=replace(block.attention, window=None))
    model = replace(decoder.model, embed=512, layers=13, prefix=(block,), period=(block, wide))
    model = replace(model, learned_positions=4096, logit_softcap=30.0)
    small = shrink(replace(decoder, model=model), devices=devices).model
    assert small.violations() == []
    assert [b.attention.window is None for b in small.blocks] == [False, False, True, False, True]
    for found in small.blocks:
        assert found.attention.heads == 2 * found.attention.kv_heads == 2 * devices
        assert found.attention.softcap == 20.0 and found.attention.qkv_bias
        assert not found.mlp.gated and found.mlp.bias
    assert small.learned_positions == seq_of(devices) and small.logit_softcap == 30.0
    assert 16 <= seq_of(devices) <= 32 and seq_of(devices) % (2 * devices) == 0, "zig-zag parts"
    assert small.padded_vocab > small.vocab, "padded rows take part"


@pytest.mark.parametrize("devices", [1, 8])
def test_shrinking_keeps_rotary_embeddings_norms_and_one_layer_of_each_kind(
    decoder: jaxtrain.Experiment, devices: int
) -> None:
    """As Gemma 3 has them, five layers with windows for one without; and LongRoPE's factors, fewer,
    in rows that are long ones."""
    norm = jaxtrain.nn.RMSNorm(unit_offset=True)
    long = jaxtrain.attention.LongRope((1.0,) * 48, tuple(map(float, range(2, 50))), 4.0, 4096)
    ropes = [
        jaxtrain.attention.Rope(1e4),
        jaxtrain.attention.Rope(1e6, jaxtrain.attention.LinearScaling(8.0)),
    ]
    ropes.append(jaxtrain.attention.Rope(1e4, long, partial_rotary_factor=0.75))
    near, far, phi = (
        jaxtrain.BlockConfig(
            jaxtrain.AttentionConfig(4, 1, 128, rope, window=window, scale=0.1, qk_norm=norm),
            jaxtrain.MlpConfig(6912),
            norm=norm,
            post_norm=norm,
        )
        for rope, window in zip(ropes, (512, None, None), strict=True)
    )
    period = (near, near, near, far, near, near)
    model = replace(decoder.model, embed=1152, layers=27, prefix=(near, near), period=period)
    model = replace(model, suffix=(phi,), init=jaxtrain.nn.Initialisation(0.02))
    assert model.violations() == []
    small = shrink(replace(decoder, model=model), devices=devices).model
    assert small.violations() == []
    assert [b.attention.window is not None for b in small.blocks] == [True] * 2 + [
        False, True, False, False,
    ]  # fmt: skip
    assert [b.attention.rope for b in small.blocks[:3]] == [ropes[0], ropes[0], ropes[1]]
    last = small.blocks[-1].attention.rope
    assert last.scaling.long_factor == (2.0, 18.0, 34.0) and last.partial_rotary_factor == 0.75
    assert last.switch < seq_of(devices), "rows are long ones"
    for found in small.blocks:
        assert found.norm == found.post_norm == found.attention.qk_norm == norm
        assert found.attention.scale == 0.1
    assert small.init.std == pytest.approx(0.02 * (1152 / small.embed) ** 0.5)
