"""What an experiment leaves open is chosen once, and whatever is wrong with it is told at once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

import jaxtrain
from jaxtrain.attention import Blockwise, Splash
from jaxtrain.attention.kernels import PlatformKernel
from jaxtrain.context import RingAttention, Ulysses
from jaxtrain.experiment.resolve import Resolved, resolve
from jaxtrain.losses import DPO
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.optim import bf16
from jaxtrain.quantization import Delayed, Fp8Products
from jaxtrain.step.assembly import try_assemble
from jaxtrain.transformer.decoder import DecoderConfig

ONE = jaxtrain.mesh_from_axes(data=1)


def resolved(experiment: jaxtrain.Experiment, **sizes: int) -> Resolved:
    given, unbuildable = resolve(experiment, ONE, sizes)
    assert unbuildable == []
    return given


def test_a_model_is_described_once(
    decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And again only as its module is made: for its shapes, and for the state's."""
    calls, describe = Counter[str](), DecoderConfig.describe

    def counted(self: DecoderConfig) -> Any:
        calls["describe"] += 1
        return describe(self)

    monkeypatch.setattr(DecoderConfig, "describe", counted)
    resolve(decoder, ONE)
    assert calls.total() == 1
    calls.clear()
    assembly, violations = try_assemble(decoder, jaxtrain.mesh_from_axes(data=2, context=2))
    assert assembly is not None and not violations
    assert calls.total() == 3


def test_other_sizes_than_the_meshs_are_those_that_count(decoder: jaxtrain.Experiment) -> None:
    """Also none: one device, as a remedy of the mesh may have it."""
    mesh = jaxtrain.mesh_from_axes(data=2)
    assert resolve(decoder, mesh)[0].sizes == {"data": 2}
    assert resolve(decoder, mesh, {})[0].sizes == {}


def test_mode_and_kernels_are_those_of_the_model_and_the_platform(
    own: jaxtrain.Experiment, decoder: jaxtrain.Experiment
) -> None:
    one, described = resolved(own), resolved(decoder)
    assert (one.mode, described.mode) == ("gspmd", "explicit")
    assert one.description is None and one.experiment == own
    execution = described.experiment.execution
    assert execution.attention == PlatformKernel("cpu", None)
    assert execution.grouped_matmul == PlatformGroupedMatmul("cpu", None)
    given = replace(decoder, execution=jaxtrain.Execution("gspmd", attention=Blockwise()))
    assert resolved(given).mode == "gspmd"
    assert resolved(given).experiment.execution.attention == Blockwise()
    assert described.can("pipeline") and not described.can("objective of another kind")
    assert not one.can("pipeline")
    wrong = resolve(replace(decoder, model=replace(decoder.model, embed=-1)), ONE)[0]
    assert wrong.description is None and wrong.can("pipeline")


def test_the_method_of_attention_over_cut_rows_is_that_of_a_devices_heads(
    decoder: jaxtrain.Experiment,
) -> None:
    """Of two heads, each of two devices along `tensor` has one, and none to trade."""
    cut = resolved(decoder, context=2)
    assert (cut.row_ways, resolved(decoder, data=2).row_ways) == (2, 1)
    assert [(part.heads, part.kv_heads) for part in cut.local_heads()] == [(2, 2)]
    by_heads = resolved(
        replace(decoder, sharding=jaxtrain.fsdp() | jaxtrain.tensor()), context=2, tensor=2
    )
    assert [(part.heads, part.kv_heads) for part in by_heads.local_heads()] == [(1, 1)]
    assert cut.context_method(8) == RingAttention(zigzag=True)
    assert cut.context_method(6) == Ulysses()  # no four chunks
    assert by_heads.context_method(6) == RingAttention(zigzag=False)
    given = replace(decoder, execution=jaxtrain.Execution(context=Ulysses()))
    assert resolved(given, context=2).context_method(8) == Ulysses()
    (block,) = decoder.model.period
    before = replace(decoder, model=replace(decoder.model, layers=3, prefix=(block,)))
    in_pipeline = resolved(replace(before, sharding=jaxtrain.fsdp() | jaxtrain.tensor()), stage=2)
    assert {(part.heads, part.kv_heads) for part in in_pipeline.local_heads()} == {(2, 2), (1, 1)}


def test_adapters_and_buffers_are_those_of_the_experiment(decoder: jaxtrain.Experiment) -> None:
    assert resolved(decoder).adapters is None and not resolved(decoder).buffers.names
    tuned = replace(decoder, fine_tuning=jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0)))
    adapters = resolved(tuned).adapters
    assert adapters is not None and (adapters.rank, adapters.scale) == (2, 2.0)
    high = replace(decoder, fine_tuning=jaxtrain.FineTuning(lora=jaxtrain.LoRA(64, 4.0)))
    assert resolved(high).adapters is None
    assert not any(resolved(e).adapter_violations for e in (decoder, tuned))
    assert resolved(high).adapter_violations
    scaled = replace(decoder, precision=replace(bf16, products=Fp8Products(Delayed())))
    assert resolved(scaled).buffers.scales
    of_pairs = replace(decoder, fine_tuning=jaxtrain.FineTuning(preferences=DPO()))
    for experiment, expected in ((decoder, False), (of_pairs, True)):
        assert resolved(experiment).described.head.of_pairs == expected


@dataclass(frozen=True)
class Undescribed:
    """A model whose describe() returns no description."""

    def describe(self) -> Any:
        return "a model"

    def build(self, key: Any, *, kernel: Any) -> Any:
        raise AssertionError("a model with a wrong description is not built")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda model: replace(model, embed=-1), "embed=-1"),
        (lambda model: 3, "give a config with build"),
        (lambda model: Undescribed(), "return a jaxtrain.models.ModelDescription"),
    ],
)
def test_a_model_that_cannot_be_built_hides_nothing_else(
    model: Any, message: str, decoder: jaxtrain.Experiment
) -> None:
    wrong = replace(
        decoder,
        model=model(decoder.model),
        batch=9,
        microbatches=2,
        execution=jaxtrain.Execution("implicit", attention=Blockwise()),
        fine_tuning=jaxtrain.FineTuning(lora=jaxtrain.LoRA(2, 4.0)),
    )
    assembly, violations = try_assemble(wrong, jaxtrain.mesh_from_axes(data=2, stage=2))
    assert assembly is None and len({*violations}) == len(violations)
    for expected in (message, "batch=9 is not a multiple", "the modes are"):
        assert sum(expected in violation for violation in violations) == 1, violations
    assert not any("lora" in v or "acts on models" in v for v in violations)


def test_what_a_model_cannot_do_hides_nothing_else(
    own: jaxtrain.Experiment, decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what its parameters say once they are known: a dim of 8 does not split in three."""
    execution = jaxtrain.Execution(loop=jaxtrain.LayerLoop(), attention=Splash())
    wrong = replace(own, execution=execution, sharding=jaxtrain.fsdp())
    assembly, violations = try_assemble(wrong, jaxtrain.mesh_from_axes(fsdp=3))
    for expected in ("execution.loop acts on", "execution.attention acts on", "embed=8"):
        assert sum(expected in violation for violation in violations) == 1, violations
    assert assembly is not None
    assert not any("is for TPUs" in violation for violation in violations)

    describe = DecoderConfig.describe
    monkeypatch.setattr(DecoderConfig, "describe", lambda self: replace(describe(self), sums=LOSS))
    taken = replace(decoder, fine_tuning=jaxtrain.FineTuning(lora=jaxtrain.LoRA(64, 4.0)))
    _, violations = try_assemble(taken, jaxtrain.mesh_from_axes(fsdp=3))
    for expected in ("a sum named 'loss'", "fine_tuning.lora.rank=64", "embed=8"):
        assert any(expected in violation for violation in violations), violations


LOSS = ("loss",)


def raises(rngs: Any) -> Any:
    raise RuntimeError("of the model's own")


def test_a_module_that_cannot_be_made_hides_no_violation(
    own: jaxtrain.Experiment, decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told where nothing else is wrong."""
    for experiment in (replace(own, model=raises), decoder):
        monkeypatch.setattr(DecoderConfig, "build", lambda self, key, *, kernel: raises(key))
        with pytest.raises(RuntimeError, match="of the model's own"):
            try_assemble(experiment, ONE)
        for wrong, expected in (
            (replace(experiment, execution=jaxtrain.Execution("implicit")), "the modes are"),
            (replace(experiment, batch=9, microbatches=2), "batch=9 is not a multiple"),
        ):
            assembly, violations = try_assemble(wrong, ONE)
            assert assembly is None and len(violations) == 1 and expected in violations[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("head", LOSS), ("fields", None), ("can", ["explicit"]), ("sums", None), ("period", None),
        ("prefix", ()), ("suffix", None),
    ],
)  # fmt: skip
def test_a_description_with_a_field_of_another_kind_is_none(
    field: str, value: Any, decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = DecoderConfig.describe
    wrong = {field: value}
    monkeypatch.setattr(DecoderConfig, "describe", lambda self: replace(describe(self), **wrong))
    of_pairs = replace(decoder, fine_tuning=jaxtrain.FineTuning(preferences=DPO()))
    for experiment in (decoder, of_pairs):
        given, (violation,) = resolve(experiment, ONE)
        assert given.description is None
        assert violation.startswith(f"model.describe(): {field}={value!r}; give ")


@pytest.mark.parametrize("mesh", ["h100_8", "cpu_8"])
def test_without_a_microbatch_the_other_violations_are_told(
    mesh: str, decoder: jaxtrain.Experiment
) -> None:
    wrong = replace(decoder, microbatches=0, clip_norm=-1.0)
    with pytest.raises(ValueError, match="microbatches=0") as told:
        jaxtrain.check(wrong, mesh)
    assert "clip_norm=-1.0" in str(told.value)


@pytest.mark.parametrize("mesh", ["h100_8", "cpu_8"])
def test_weights_are_not_compared_with_adapters_that_cannot_be(
    mesh: str, decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_at(assembly: Any) -> None:
        raise AssertionError("the model has none of its adapters")

    monkeypatch.setattr("jaxtrain.session.check.settled_start", looked_at)
    tuning = jaxtrain.FineTuning(lora=jaxtrain.LoRA(64, 4.0))
    with pytest.raises(ValueError, match="rank=64 is not below the smaller side"):
        jaxtrain.check(replace(decoder, batch=16, fine_tuning=tuning), mesh)
