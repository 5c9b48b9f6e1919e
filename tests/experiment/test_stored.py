"""A run's config.json is data, perhaps a stranger's: what it may name, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxtrain
from jaxtrain import cli
from jaxtrain.attention import Blockwise, Cudnn, Reference, Splash, SplashBlocks
from jaxtrain.attention.kernels import PlatformKernel
from jaxtrain.checkpoint.run_config import write_config
from jaxtrain.experiment import completed, config_of, of_another
from jaxtrain.experiment.reading import Reader
from jaxtrain.experiment.stored import (
    RESUMABLE,
    ForeignField,
    present_name,
    refuse_unreadable,
    stored_field,
    unreadable,
)
from jaxtrain.experiment.vocabulary import CLASSES, PROTOCOLS, Slot, slots_of
from jaxtrain.moe.kernels import PlatformGroupedMatmul
from jaxtrain.nn.norm import RMSNorm
from jaxtrain.transformer.feed_forward import gelu_tanh
from jaxtrain.transformer.mixture import SharedExpert
from jaxtrain.weights.loading import load

BLOCK = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=8))
EXPERIMENT = jaxtrain.Experiment(
    model=jaxtrain.DecoderConfig(vocab=257, embed=8, layers=2, period=(BLOCK,)),
    data=jaxtrain.TextData(seq=8),
    optimizer=jaxtrain.AdamW(jaxtrain.WarmupCosine(1e-3)),
    steps=2,
    batch=2,
)


def run_with(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A run directory as a stranger sends one: config.json, with something else written in it."""
    folder.mkdir(exist_ok=True)
    (folder / "checkpoints").mkdir(exist_ok=True)
    config = config_of(EXPERIMENT)
    change(config)
    (folder / "config.json").write_text(json.dumps({"experiment": config}))
    return folder


# What runs a stranger's code.


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module in the run directory, and the folder above it importable; the file it would write
    when imported."""
    (tmp_path / "stranger_run").mkdir()
    marker = tmp_path / "ran"
    text = (
        "from dataclasses import dataclass\nfrom pathlib import Path\nimport subprocess\n"
        f"Path({str(marker)!r}).touch()\n"
        "@dataclass(frozen=True)\nclass X:\n    start: object = None\n    lora: object = None\n"
        "def double(x):\n    return x + x\n"
    )
    (tmp_path / "stranger_run" / "helpers.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    yield marker
    for name in [name for name in sys.modules if name.split(".")[0] == "stranger_run"]:
        del sys.modules[name]


def test_a_run_from_before_adapters_left_the_block_is_read() -> None:
    """A field of `BlockConfig` once, None in every run; nothing else of its name is dropped."""
    new = {"experiment": config_of(EXPERIMENT)}
    old = json.loads(json.dumps(new))
    (block,) = old["experiment"]["model"]["period"]
    block["adapters"] = None
    assert completed(old) == new
    block["adapters"] = 3
    assert completed(old) != new and unreadable(completed(old))


def test_a_run_from_before_experts_had_routers_is_read() -> None:
    """They were Mixtral's: what a run without the fields says is the same experiment."""
    (block,) = EXPERIMENT.model.period
    moe = replace(block, mlp=jaxtrain.MoeConfig(8, experts=4))
    model = replace(EXPERIMENT.model, period=(moe,))
    new = json.loads(json.dumps({"experiment": config_of(replace(EXPERIMENT, model=model))}))
    old = json.loads(json.dumps(new))
    for name in ("router", "shared", "capacity", "balance"):
        del old["experiment"]["model"]["period"][0]["mlp"][name]
    assert completed(old) == new and not unreadable(completed(old))


ONCE = [
    ({"class": "nn.attention:Splash", "block": 256}, Splash(SplashBlocks(*[256] * 8))),
    ({"class": "attention.kernels:Splash", "block": 512, "interpret": True},
     Splash(SplashBlocks(), interpret=True)),
    ({"class": "nn.attention:Cudnn"}, Cudnn()),
    ({"class": "attention.kernels:Cudnn"}, Cudnn()),
    ({"class": "nn.attention:Reference"}, Reference()),
    ({"class": "nn.attention:PlatformKernel", "platform": "tpu"}, PlatformKernel("tpu")),
    ({"class": "nn.blockwise:Blockwise", "query_block": 64, "key_block": 128}, Blockwise(64, 128)),
]  # fmt: skip


def test_a_run_names_blocks_where_they_once_were() -> None:
    """One file held them, and their activations: functions by name."""
    (block,) = EXPERIMENT.model.period
    moe = jaxtrain.MoeConfig(8, experts=4, activation=gelu_tanh, shared=SharedExpert(4))
    model = replace(EXPERIMENT.model, period=(block, replace(block, mlp=moe)))
    new = json.dumps({"experiment": config_of(replace(EXPERIMENT, model=model))})
    of_blocks = r"jaxtrain\.transformer\.(?!decoder)\w+:"
    old, moved = re.subn(of_blocks, "jaxtrain.models.block:", new)
    assert moved == 9
    assert completed(json.loads(old)) == json.loads(new)


@pytest.mark.parametrize("name", ["LinearScaling", "Llama3Scaling"])
def test_a_run_names_rotary_embeddings_where_they_once_were(name: str) -> None:
    """Also as it is older than the share of a head that is turned."""
    (block,) = EXPERIMENT.model.period
    rope = jaxtrain.attention.Rope(scaling=getattr(jaxtrain.attention, name)(2.0))
    turned = replace(block, attention=replace(block.attention, rope=rope))
    model = replace(EXPERIMENT.model, period=(turned,))
    new = json.dumps({"experiment": config_of(replace(EXPERIMENT, model=model))})
    old, moved = re.subn(r"jaxtrain\.attention\.rotary\.\w+:", "jaxtrain.nn.rotary:", new)
    old, older = re.subn(r', "partial_rotary_factor": 1\.0', "", old)
    assert (moved, older) == (2, 1)
    assert completed(json.loads(old)) == json.loads(new)


ROOMS_ONCE = {
    "jaxtrain.transformer.decoder:": "jaxtrain.models.decoder:",
    "jaxtrain.transformer.": "jaxtrain.models.transformer.",
    "jaxtrain.attention.rotary.": "jaxtrain.nn.rotary.",
    "jaxtrain.quantization.": "jaxtrain.nn.quantized.",
    "jaxtrain.compression.codecs:": "jaxtrain.collectives.compression:",
    "jaxtrain.compression.": "jaxtrain.collectives.",
}


def test_a_run_names_rooms_as_they_once_were() -> None:
    """Every class of a room that has moved, read again as today's."""
    (block,) = EXPERIMENT.model.period
    scaling = jaxtrain.attention.Yarn(2.0, 8)
    attention = replace(block.attention, rope=jaxtrain.attention.Rope(scaling=scaling))
    latent = jaxtrain.transformer.LatentAttentionConfig(heads=2)
    mlp = jaxtrain.MoeConfig(8, experts=4, activation=gelu_tanh, shared=SharedExpert(4))
    period = (replace(block, attention=attention), replace(block, attention=latent, mlp=mlp))
    scaled = jaxtrain.quantization.Fp8Products(jaxtrain.quantization.Delayed())
    experiments = [
        replace(
            EXPERIMENT,
            model=replace(EXPERIMENT.model, period=period),
            precision=replace(jaxtrain.bf16, products=scaled),
            execution=jaxtrain.Execution(reducer=jaxtrain.compression.Compressed(codec)),
        )
        for codec in (jaxtrain.compression.TopK(0.1), jaxtrain.compression.PowerSGD(2))
    ]
    new = json.dumps({"experiments": [config_of(each) for each in experiments]})
    old, counts = new, {}
    for now, once in ROOMS_ONCE.items():
        old, counts[now] = re.subn(f'"{re.escape(now)}', f'"{once}', old)
    assert all(counts.values()), counts
    assert not re.search("|".join(f'"{re.escape(now)}' for now in ROOMS_ONCE), old)
    for stored, today in zip(*(json.loads(x)["experiments"] for x in (old, new)), strict=True):
        assert completed({"experiment": stored}) == {"experiment": today}
        assert not unreadable({"experiment": today})


@pytest.mark.parametrize(("was", "kernel"), ONCE, ids=str)
def test_a_run_names_kernels_where_they_once_were(was: dict[str, Any], kernel: Any) -> None:
    """`nn/` held them, and then one file: such a run is the same experiment, and is read."""
    experiment = replace(EXPERIMENT, execution=jaxtrain.Execution(attention=kernel))
    new = json.loads(json.dumps({"experiment": config_of(experiment)}))
    old = json.loads(json.dumps(new))
    old["experiment"]["execution"]["attention"] = was | {"class": f"jaxtrain.{was['class']}"}
    assert completed(old) == new
    assert not unreadable(completed(old))


def test_no_module_in_a_run_directory_is_imported(
    helpers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(
        Path("stranger_run"), lambda c: c.update(fine_tuning={"class": "stranger_run.helpers:X"})
    )
    assert cli.main(["generate", str(run), "--prompt", "a"]) == cli.REFUSED
    assert not helpers.exists() and "stranger_run.helpers" not in sys.modules
    assert "the run's fine_tuning cannot be read" in capsys.readouterr().err
    # `FineTuning` is a class of ours and no other: it is not a matter of trust.
    with pytest.raises(ValueError, match="a run has FineTuning or null there"):
        load(run, trust="stranger_run")
    assert not helpers.exists()


def test_code_of_the_callers_own_is_imported_when_the_caller_says_so(helpers: Path) -> None:
    def names(config: dict[str, Any]) -> None:
        config["model"]["period"][0]["mlp"]["activation"] = "stranger_run.helpers:double"
        config["data"] = {"class": "stranger_run.helpers:X", "start": [1, "os:system"]}

    run = run_with(Path("stranger_run"), names)
    for trust in ((), "another", ("stranger", "stranger_run.helper")):
        with pytest.raises(ValueError, match=r'trust="stranger_run" \(--trust stranger_run\)'):
            stored_field(run, "model", trust=trust)
        with pytest.raises(ForeignField):  # all of it, and not a part
            stored_field(run, "data", trust=trust)
    assert not helpers.exists()
    model = stored_field(run, "model", trust="stranger_run")
    assert helpers.exists() and model.period[0].mlp.activation(2) == 4
    data = stored_field(run, "data", trust=("another", "stranger_run.helpers"))
    assert (type(data).__name__, data.start) == ("X", (1, "os:system"))  # a text, not a function

    for name, told in (
        ("stranger_run.helpers:subprocess.call", "is subprocess:call, which is not that module's"),
        ("stranger_run.helpers:subprocess", "which is not that module's own"),
        ("stranger_run.helpers:triple", "cannot be imported .*no attribute 'triple'"),
        ("stranger_run.nowhere:f", "cannot be imported .*No module named"),
    ):
        run_with(run, lambda c, name=name: c["optimizer"].update(decay=name))
        with pytest.raises(ValueError, match=told):
            stored_field(run, "optimizer", trust="stranger_run")
    for name in ("", "../stranger_run", "a:b", 3, ("a", "b c")):
        with pytest.raises(ValueError, match="which is no module's name; write it as `import`"):
            stored_field(run, "steps", trust=name)  # type: ignore[arg-type]


TROUBLED = {
    "an annotation for type checkers alone": (
        "    start: Nowhere = None\n",
        r"data: .*:X cannot be made \(NameError: name 'Nowhere' is not defined\)",
    ),
    "a constructor that raises": (
        "    start: object = None\n    def __post_init__(self): self.start + 1\n",
        r"data: .*:X cannot be made \(TypeError: unsupported operand",
    ),
}


@pytest.mark.parametrize("what", TROUBLED)
def test_what_a_class_of_the_callers_own_raises_names_it(what: str, helpers: Path) -> None:
    fields, told = TROUBLED[what]
    (helpers.parent / "stranger_run" / "troubled.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        f"@dataclass(frozen=True)\nclass X:\n{fields}"
    )
    stored = {"class": "stranger_run.troubled:X", "start": None}
    run = run_with(Path("stranger_run"), lambda config: config.update(data=stored))
    with pytest.raises(ValueError, match=told):
        stored_field(run, "data", trust="stranger_run")


# What is no experiment.

HOSTILE: dict[str, tuple[str, Any, str]] = {
    "a text for a number": (
        "model.vocab",
        "many",
        "model.vocab is 'many'; a run has a whole",
    ),
    "a fraction for a count": (
        "model.layers",
        2.5,
        "model.layers is 2.5; a run has a whole",
    ),
    "true for a number": ("model.embed", True, "model.embed is True; a run has a whole"),
    "a number for a flag": ("model.tied", 1, "model.tied is 1; a run has true or false there"),
    "null where none may be": ("model.period", None, "model.period is None; a run has a list"),
    "a list for a number": ("model.vocab", [1], r"model.vocab is \[1\]; a run has a whole"),
    "a list of no blocks": ("model.period", [3], r"model.period\[0\] is 3; a run has BlockConfig"),
    "a number beyond 64 bits": ("model.layers", 2**63, "model.layers is a number beyond 64 bits"),
    "no class": ("model.init", {"std": 1.0}, r"model.init.class is None; every object names its"),
    "a class that is a number": ("model.init", {"class": 3}, "model.init.class is 3"),
    "a class that is a list": ("model", {"class": ["a"]}, r"model.class is \['a'\]; every object"),
    "a class that is no name": ("model", {"class": "rm -rf"}, "a class is named as module:name"),
    "an unknown class": (
        "model",
        {"class": "jaxtrain.a:B"},
        "'jaxtrain.a:B', which is not of",
    ),
    "another class of ours": (
        "model.init",
        {"class": "jaxtrain.nn.norm:RMSNorm"},
        "model.init is 'jaxtrain.nn.norm:RMSNorm'; a run has Initialisation there",
    ),
    "ours that no run holds": (
        "model",
        {"class": "jaxtrain.mesh.mesh:MeshSpec", "name": "a"},
        "model is 'jaxtrain.mesh.mesh:MeshSpec', which is not of this library",
    ),
    "a class for a function": (
        "optimizer.decay",
        {"class": "jaxtrain.nn.norm:RMSNorm"},
        "optimizer.decay is 'jaxtrain.nn.norm:RMSNorm'; a run has a func",
    ),
    "a function of the system": (
        "optimizer.decay",
        "os:system",
        "'os:system', which is not of",
    ),
    "a function of JAX's": ("optimizer.decay", "jax:jit", "optimizer.decay is 'jax:jit', which is"),
    "another function of ours": (
        "optimizer.decay",
        "jaxtrain.transformer.feed_forward:silu",
        "'jaxtrain.transformer.feed_forward:silu', which is not of",
    ),
    "a text for a function": (
        "optimizer.decay",
        "all",
        "decay is 'all'; a run has a func",
    ),
    "a dtype of numpy's objects": ("precision.compute", "numpy:object_", "a run has a dtype there"),
    "a dtype by a path": ("precision.compute", "numpy.ctypeslib:load_library", "has a dtype there"),
    "a dtype that is a number": (
        "precision.compute",
        16,
        "precision.compute is 16; a run has a",
    ),
    "a kernel by its name": (
        "execution.attention",
        "os:system",
        "'os:system', which is not of",
    ),
    "an unknown field": (
        "model.secret",
        1,
        "model.secret is no field of DecoderConfig; read",
    ),
    "a lone half of a pair": (
        "sharding.params",
        [["embed"]],
        r"sharding.params\[0\] is \['embed'\]; a run has a list there",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_value_of_another_kind_is_refused_before_anything_is_built(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, value, told = HOSTILE[case]
    monkeypatch.setattr(importlib, "import_module", pytest.fail)

    def change(config: dict[str, Any]) -> None:
        *above, last = path.split(".")
        for name in above:
            config = config[name]
        config[last] = value

    run = run_with(tmp_path, change)
    with pytest.raises(ValueError, match=told):
        stored_field(run, path.split(".")[0])


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    def change(config: dict[str, Any]) -> None:
        config["model"] |= {"vocab": "a", "tied": 0, "init": {"class": "os:system"}}
        del config["model"]["embed"]

    with pytest.raises(ValueError) as caught:
        stored_field(run_with(tmp_path, change), "model")
    said = str(caught.value)
    for part in ("vocab is 'a'", "tied is 0", "init is 'os:system'", "model.embed is missing"):
        assert part in said, said


def test_what_cannot_be_built_is_told_with_its_place(tmp_path: Path) -> None:
    run = run_with(tmp_path, lambda c: c["optimizer"].update(b1=7.0))
    with pytest.raises(ValueError, match=r"the run's optimizer cannot be read: .*b1=7.0 must lie"):
        stored_field(run, "optimizer")


def test_what_could_not_be_read_again_is_refused_before_it_trains(tmp_path: Path) -> None:
    own = replace(EXPERIMENT, data=Grown(newer=3))
    config = config_of(own)
    for name in ("test_stored:Grown", "an experiment-file:Ünïcode", "2nd.try:Outer.Inner"):
        config["data"]["class"] = name
        refuse_unreadable({"experiment": config})
    odd = replace(EXPERIMENT, model=replace(EXPERIMENT.model, tied=1, norm=RMSNorm(eps="small")))
    with pytest.raises(ValueError) as caught:
        jaxtrain.train(odd, jaxtrain.mesh_from_axes(data=1), run_dir=tmp_path / "run")
    for part in (
        "model.tied is 1; a run has true",
        "model.norm.eps is 'small'; a run has a number",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_number_of_numpys_is_a_number(tmp_path: Path) -> None:
    """As JSON has it: a run with one may begin, and comes back as a run with the same number."""
    rate = np.sqrt(0.5) * 1e-2
    assert type(rate) is np.float64
    config = {"experiment": config_of(replace(EXPERIMENT, optimizer=jaxtrain.AdamW(rate)))}
    refuse_unreadable(config)
    write_config(tmp_path, config)
    assert stored_field(tmp_path, "optimizer") == jaxtrain.AdamW(float(rate))


# What may be named: everything an experiment can hold, and nothing else.


def instances(kind: type, seen: tuple[type, ...] = ()) -> Iterator[Any]:
    """Values of a dataclass: for each field each of what may stand there, as far as it is taken."""
    base = default(kind)
    yield base
    for name, slot in slots_of(kind).items():
        for value in held(slot, (*seen, kind)):
            with suppress(ValueError, TypeError):  # not with the other fields' values
                yield replace(base, **{name: value})


def held(slot: Slot, seen: tuple[type, ...]) -> Iterator[Any]:
    samples = {int: (1, 2), float: (0.5, 2.0, float("inf")), bool: (True, False), str: ("os:sep",)}
    for scalar in slot.scalars:
        yield from samples.get(scalar, (None,) if scalar is types.NoneType else ())
    yield from slot.functions.values()
    if slot.dtypes:
        yield from (jaxtrain.bf16.compute, "float32")
    for kind in slot.dataclasses:
        if kind not in seen:
            yield default(kind)
    for items, _ in slot.tuples:
        columns = [next(held(item, seen), None) for item in items]
        yield tuple(columns)


def default(kind: type) -> Any:
    first = dataclasses.fields(kind)[:1]
    if kind not in REQUIRED and [each.name for each in first] in (["learning_rate"], ["peak"]):
        return kind(0.5)
    return REQUIRED[kind]() if kind in REQUIRED else kind()


def row_maker(split: str, *, seed: int, epoch: int) -> Iterator[Any]:
    yield from ()


REQUIRED: dict[type, Callable[[], Any]] = {
    jaxtrain.Experiment: lambda: EXPERIMENT,
    jaxtrain.DecoderConfig: lambda: EXPERIMENT.model,
    jaxtrain.BlockConfig: lambda: BLOCK,
    jaxtrain.AttentionConfig: lambda: BLOCK.attention,
    jaxtrain.MlpConfig: lambda: BLOCK.mlp,
    jaxtrain.MoeConfig: lambda: jaxtrain.MoeConfig(8, 4),
    jaxtrain.data.BatchRamp: lambda: jaxtrain.data.BatchRamp(2, 4, 2, 10),
    jaxtrain.data.BigramChain: lambda: jaxtrain.data.BigramChain(8, 8),
    jaxtrain.data.RowStream: lambda: jaxtrain.data.RowStream(row_maker, "1", seq=8, rows=8),
    jaxtrain.checkpoint.Best: lambda: jaxtrain.checkpoint.Best("loss"),
    jaxtrain.compression.Compressed: lambda: jaxtrain.compression.Compressed(
        jaxtrain.compression.Int8()
    ),
    jaxtrain.context.TwoLevel: lambda: jaxtrain.context.TwoLevel(2),
    jaxtrain.FromHuggingFace: lambda: jaxtrain.FromHuggingFace("a"),
    jaxtrain.FromRun: lambda: jaxtrain.FromRun("a"),
    jaxtrain.collectives.Hierarchical: lambda: jaxtrain.collectives.Hierarchical(
        jaxtrain.collectives.Ring(), jaxtrain.collectives.Lax()
    ),
    jaxtrain.data.Csv: lambda: jaxtrain.data.Csv("a"),
    jaxtrain.data.Conversations: lambda: jaxtrain.data.Conversations("a"),
    jaxtrain.data.Preferences: lambda: jaxtrain.data.Preferences("a"),
    jaxtrain.data.JsonLines: lambda: jaxtrain.data.JsonLines("a"),
    jaxtrain.data.Mixture: lambda: jaxtrain.data.Mixture(((0.5, jaxtrain.data.StdlibSource()),)),
    jaxtrain.data.Parquet: lambda: jaxtrain.data.Parquet("a"),
    jaxtrain.Sample: lambda: jaxtrain.Sample("a"),
    jaxtrain.tasks.Tasks: lambda: jaxtrain.tasks.Tasks(("a",)),
    jaxtrain.transformer.SharedExpert: lambda: jaxtrain.transformer.SharedExpert(4),
    jaxtrain.transformer.LatentAttentionConfig: lambda: jaxtrain.transformer.LatentAttentionConfig(
        heads=2
    ),
    jaxtrain.moe.Groups: lambda: jaxtrain.moe.Groups(4, 2),
    jaxtrain.optim.ScaledRate: lambda: jaxtrain.optim.ScaledRate(0.5, 8),
    jaxtrain.Steps: lambda: jaxtrain.Steps(1, 2),
    jaxtrain.TextFiles: lambda: jaxtrain.TextFiles("a"),
    jaxtrain.data.TokenFiles: lambda: jaxtrain.data.TokenFiles("a"),
    jaxtrain.data.TokenizerFile: lambda: jaxtrain.data.TokenizerFile("a"),
    jaxtrain.attention.LinearScaling: lambda: jaxtrain.attention.LinearScaling(2.0),
    jaxtrain.attention.Yarn: lambda: jaxtrain.attention.Yarn(2.0, 8),
    jaxtrain.attention.DynamicNtk: lambda: jaxtrain.attention.DynamicNtk(2.0, 8),
    jaxtrain.attention.LongRope: lambda: jaxtrain.attention.LongRope((1.0,), (2.0,), 4.0, 8),
    jaxtrain.optim.WarmupStableDecay: lambda: jaxtrain.optim.WarmupStableDecay(0.5, decay=2),
    jaxtrain.optim.InverseSqrt: lambda: jaxtrain.optim.InverseSqrt(0.5, warmup=2),
    CLASSES["jaxtrain.attention.kernels:PlatformKernel"]: lambda: PlatformKernel("cpu"),
    CLASSES["jaxtrain.moe.kernels:PlatformGroupedMatmul"]: lambda: PlatformGroupedMatmul("cpu"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_config_class_comes_back_as_it_was(name: str) -> None:
    kind = CLASSES[name]
    for value in instances(kind):
        reader = Reader(__name__)  # for `row_maker` alone
        config = json.loads(json.dumps(config_of(value)))
        make = reader.read(config, Slot(dataclasses=(kind,)), name)
        assert not reader.violations, reader.violations
        back = make()
        assert back == value and config_of(back) == config_of(value)


def test_no_class_that_an_experiment_may_hold_is_forgotten() -> None:
    """Public dataclasses, those that do what a protocol asks, and kernels: found in the modules."""
    forgotten = set()
    for module in pkgutil.walk_packages(jaxtrain.__path__, "jaxtrain."):
        if module.name.endswith(("__main__", "_worker", "language_model")):  # of an extra
            continue
        for kind in vars(importlib.import_module(module.name)).values():
            if not isinstance(kind, type) or kind.__module__ != module.name:
                continue
            if not dataclasses.is_dataclass(kind) or kind in CLASSES.values():
                continue
            if inspect.isabstract(kind):
                continue
            does = [
                protocol
                for protocol in PROTOCOLS
                if all(
                    hasattr(kind, name) and not isinstance(getattr(kind, name), int | float)
                    for name in vars(protocol)
                    if not name.startswith("_")
                )
            ]
            acts = [n for n in ("build", "open", "__call__") if callable(vars(kind).get(n))]
            frozen = kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
            if frozen and (does or acts or kind.__name__ in jaxtrain.__all__):
                forgotten.add(kind.__name__)
    # Of an `Optax` what it was given is stored; `bench gpu` has documents of its own. Models make
    # a `SelfAttention`, no experiment; what is made to look at a saved run is stored nowhere.
    known = {"MeshSpec", "Layers", "Executor", "Optax", "SyntheticDocuments"}
    known |= {"SelfAttention", "ExpertLayer", "Interleaved", "Numbered", "ScoreFunction"}
    known |= {"GivenTokenizer", "OneSplit", "GivenRows", "MadePairs"}
    assert forgotten == known, "say in vocabulary.py who holds it"


def test_every_name_that_was_ever_stored_is_read() -> None:
    """Classes of this library by the names under which runs have them. A class that moves keeps its
    old name here, and gets an entry in `MOVED`; a new one is added."""
    names = (Path(__file__).parent / "stored_names.txt").read_text().split()
    assert names == sorted(names)
    assert [name for name in names if present_name(name) not in CLASSES] == []
    assert sorted(CLASSES.keys() - {*names}) == [], "add them"


def does(kind: type, protocol: Any) -> bool:
    """Whether it has the methods of a protocol, with the same parameters."""
    for name, member in vars(protocol).items():
        if not name.startswith("_") and callable(member):
            mine = getattr(kind, name, None)
            if mine is None or [*signature(mine).parameters] != [*signature(member).parameters]:
                return False
    return True


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.__name__)
def test_whatever_does_what_a_protocol_asks_may_stand_for_it(protocol: Any) -> None:
    assert set(PROTOCOLS[protocol]) == {kind for kind in CLASSES.values() if does(kind, protocol)}


# Resume.


@dataclass(frozen=True)
class Grown:
    """A class of the user's own, one field of which is newer than the run."""

    kept: int = 1
    newer: Any = field(default_factory=lambda: Grown.calls.append(1) or 2)

    calls = []  # noqa: RUF012

    def build(self) -> None: ...

    def open(self) -> None: ...


def test_resume_calls_no_factory_of_a_class_the_experiment_has_not() -> None:
    """It was enough that the class stood in a module that somebody had imported."""
    grown = Grown(newer=2)
    config = {"experiment": config_of(replace(EXPERIMENT, data=grown))}
    del config["experiment"]["data"]["newer"], config["experiment"]["microbatches"]
    Grown.calls.clear()
    there = completed(config)["experiment"]
    assert there["microbatches"] == 1 and "newer" not in there["data"]
    assert completed(config, EXPERIMENT)["experiment"] == there and not Grown.calls
    # Of the experiment at hand the classes are the user's own.
    assert completed(config, replace(EXPERIMENT, data=grown))["experiment"]["data"]["newer"] == 2


def test_what_is_defined_within_a_function_is_not_stored() -> None:
    """A run that could not be read back is refused before it begins, by `check` too."""

    @dataclasses.dataclass(frozen=True)
    class Local(OwnData): ...

    with pytest.raises(ValueError, match=r"^experiment\.data is of .*Local: classes within a func"):
        config_of(replace(EXPERIMENT, data=Local()))


def test_a_resumed_run_may_change_what_leaves_its_numbers_as_they_are() -> None:
    """Of an experiment and its execution all but these: they decide what is learned."""
    learned = {
        *("model", "data", "optimizer", "steps", "batch", "seed", "precision", "clip_norm"),
        *("ema_decay", "fine_tuning"),
        *("execution.reducer", "execution.small_leaf"),
    }
    every = {f.name for f in dataclasses.fields(jaxtrain.Experiment)} - {"execution"}
    every |= {f"execution.{f.name}" for f in dataclasses.fields(jaxtrain.Execution)}
    assert every - {name.removeprefix("experiment.") for name in RESUMABLE} == learned


@dataclasses.dataclass(frozen=True)
class OwnData:
    """A user's own, with a field that older runs of it lack."""

    seq: int = 8
    newer: int = 3

    def open(self, split: str, *, seed: int, cache_dir: Path) -> None: ...


def test_a_step_is_of_another_experiment_only_by_what_both_say() -> None:
    """Fields that came later have their defaults on either side: this library's always, a user's
    own where the experiment is at hand; without it they tell nothing."""
    experiment = dataclasses.replace(EXPERIMENT, data=OwnData())
    now = json.loads(json.dumps(config_of(experiment)))
    assert of_another({}, now) == of_another({"experiment": now}, now) == []
    for name, path in (("seed", ()), ("newer", ("data",))):
        older = copy.deepcopy(now)
        there = older
        for part in path:
            there = there[part]
        del there[name]
        assert of_another({"experiment": older}, now, experiment) == []
        assert of_another({"experiment": older}, now) == []
        assert of_another({"experiment": now}, older) == []
    changed = dataclasses.replace(experiment, data=OwnData(newer=4), seed=5, steps=experiment.steps)
    (told,) = of_another({"experiment": json.loads(json.dumps(config_of(changed)))}, now)
    assert "experiment.seed was 5, now 0" in told and "experiment.data.newer was 4, now 3" in told
    place, moved = "jaxtrain.transformer.attention:", "jaxtrain.models.block:"
    assert place in json.dumps(now)
    before = json.loads(json.dumps(now).replace(place, moved))
    assert of_another({"experiment": before}, now) == of_another({"experiment": now}, before) == []
    older = copy.deepcopy(now)
    del older["data"]["newer"]
    four = dataclasses.replace(experiment, data=OwnData(newer=4))
    (told,) = of_another({"experiment": older}, json.loads(json.dumps(config_of(four))), four)
    assert "experiment.data.newer was 3, now 4" in told
    logged = dataclasses.replace(experiment, logging=jaxtrain.Logging(every=99))
    assert of_another({"experiment": config_of(logged)}, now) == []
