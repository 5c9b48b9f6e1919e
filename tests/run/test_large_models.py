"""The experiments shipped, on the machines they are written for: the largest counted, placed and
weighed without a device; compiled, where the compilers are installed."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jaxtrain
from jaxtrain import DecoderConfig
from jaxtrain.contract.compile import compile
from jaxtrain.mesh.mesh import load_mesh

ROOT = Path(__file__).parents[2]
GPT3 = ("gpt3_175b", "v5p_512_stage8")
MTNLG = ("mtnlg_530b", "h100_1024_stage4")
MTNLG_SHARDED = ("mtnlg_530b", "h100_1024_stage4_fsdp32")


def files(name: str, mesh: str) -> tuple[str, str]:
    return str(ROOT / f"experiments/{name}.py"), str(ROOT / f"meshes/{mesh}.toml")


def parameters_of_gpt(model: DecoderConfig) -> int:
    """12 d^2 + 13 d a layer (attention 4 d^2, the two matrices of the MLP 8 d^2; biases 9 d, two
    norms 4 d), vocabulary and positions, and the last norm."""
    d, rows = model.embed, model.vocab + (model.learned_positions or 0)
    return model.layers * (12 * d * d + 13 * d) + rows * d + 2 * d


@pytest.mark.parametrize(
    ("name", "layers", "embed", "heads", "vocab", "billions"),
    [
        ("gpt3_175b", 96, 12_288, 96, 50_257, 174.6),  # Brown et al. 2020, tables 2.1 and D.1
        ("mtnlg_530b", 105, 20_480, 128, 51_200, 529.6),  # Smith et al. 2022, section 3.1
    ],
)
def test_it_is_the_published_model(
    name: str, layers: int, embed: int, heads: int, vocab: int, billions: float
) -> None:
    e = jaxtrain.load_experiment(ROOT / f"experiments/{name}.py")
    (block,) = e.model.period
    assert (e.model.layers, e.model.embed, e.model.vocab) == (layers, embed, vocab)
    assert block.attention.heads == heads and block.mlp.hidden == 4 * embed
    assert block.attention.size(embed) == embed // heads
    assert (e.model.learned_positions, e.data.seq, e.batch) == (2048, 2048, 1536)
    assert parameters_of_gpt(e.model) / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("name", "mesh", "split", "slots"),
    [
        (*GPT3, 512, 96),
        (*MTNLG, 4 * 8, 108),  # whole on each of 32 pipelines; 105 layers in 36 positions of 3
        (*MTNLG_SHARDED, 1024, 108),
    ],
)
def test_it_is_cut_for_its_mesh_without_device_or_data(
    name: str, mesh: str, split: int, slots: int
) -> None:
    """`split`: into how many parts the parameters are; 4 bytes each, and 8 for Adam's moments."""
    experiment, machine = files(name, mesh)
    spec = load_mesh(machine)
    larger = replace(spec, chip=replace(spec.chip, usable_gbytes=1000.0))  # holds whatever it is
    report = jaxtrain.check(experiment, larger, data_here=False)
    model, layout = report.assembly.experiment.model, report.assembly.pipeline.layout
    assert report.parameters == parameters_of_gpt(model)
    assert layout.positions * layout.depth == slots == model.layers + layout.padding
    weights = report.bytes_per_device
    least = report.parameters * slots / model.layers / split
    # What is whole on more devices (biases, norms, positions) is a hundredth.
    assert 4 * least < weights["params"] < 4.05 * least
    assert 8 * least < weights["optimizer"] < 8.1 * least


def test_a_state_that_fits_no_chip_is_refused_before_anything_compiles() -> None:
    """68 GB of whole fp32 parameters and 136 of Adam's moments, on chips of 80 GB; 1024 hold it."""
    for name, mesh in (GPT3, MTNLG_SHARDED):
        jaxtrain.check(*files(name, mesh), data_here=False)
    with pytest.raises(ValueError, match=r"holds 2\d\d\.\d GB on each device.*params 68") as told:
        jaxtrain.check(*files(*MTNLG), data_here=False)
    with pytest.raises(ValueError, match=r"holds 2\d\d\.\d GB on each device") as refused:
        compile(*files(*MTNLG), progress=pytest.fail)
    assert "1 thing to mend" in str(refused.value), "data may be elsewhere"
    assert "63.7 GB, 75% of the memory of a h100_sxm" in str(told.value)
    assert "XLA_CLIENT_MEM_FRACTION" in str(told.value) and "fsdp()" in str(told.value)


COMPILERS = {
    **dict.fromkeys(("v5e", "v5p", "v6e"), ("libtpu",)),
    "h100": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
}


def compiled(name: str, mesh: str, *settings: str) -> dict[str, Any]:
    """What `jaxtrain compile` finds, or skips where the chips' compiler is not installed."""
    chip = mesh.partition("_")[0]
    if not any(importlib.util.find_spec(plugin) for plugin in COMPILERS[chip]):
        pytest.skip(f"compiles for an absent {chip}: pip install '.[tpu]' or '.[cuda12]'")
    experiment, machine = files(name, mesh)
    command = [Path(sys.executable).parent / "jaxtrain", "compile", experiment]
    unlike = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    done = subprocess.run(
        [*command, "--mesh", machine, "--json", *(f"--set={each}" for each in settings)],
        env={k: v for k, v in os.environ.items() if k not in unlike},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "mesh"), [GPT3, MTNLG_SHARDED])
def test_the_compiler_says_that_it_fits(name: str, mesh: str) -> None:
    """The whole model, for 512 or 1024 chips that are not here: a minute or two."""
    found = compiled(name, mesh)
    assert found["fits"] is True
    state = jaxtrain.check(*files(name, mesh), data_here=False).bytes_per_device
    assert found["bytes_per_device"]["peak"] > state["total"]


ONE = "model.layers=1"
IN_CI = ("llama2_7b", "v5p_16", ONE)
OF_256 = (ONE, "batch=2048", "microbatches=8")
BY_HAND = [
    ("llama3_1b", "v5e_16", ONE),
    ("llama3_1b", "v5e_256", *OF_256),
    ("llama3_1b", "v6e_256", *OF_256),
    ("llama3_8b", "v5p_512", ONE),
    ("llama3_8b_128k", "v5p_512_context8", ONE),
    ("mixtral_8x7b", "v5p_512", ONE),
    ("switch_1_6t", "v5p_512_expert64", ONE),
    ("gpt3_175b", "v5p_512_stage8", "model.layers=8"),
]


def test_every_shipped_mesh_of_tpus_is_compiled_for() -> None:
    meshes = {path.stem: load_mesh(path) for path in (ROOT / "meshes").glob("*.toml")}
    of_tpus = {name for name, mesh in meshes.items() if mesh.chip.platform == "tpu"}
    assert {mesh for _, mesh, *_ in (IN_CI, *BY_HAND)} == of_tpus != set()


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(IN_CI, marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.exhaustive) for each in BY_HAND),
    ],
    ids=lambda given: " on ".join(given[:2]),
)
def test_a_step_on_absent_tpus_fits_and_sends_what_is_predicted(given: tuple[str, ...]) -> None:
    """Of few layers, by the compiler options of its mesh file: a minute or two each."""
    found, chip = compiled(*given), load_mesh(files(*given[:2])[1]).chip
    assert found["contract"] is True and found["fits"] is True
    assert chip.clock_ghz is not None
    estimate = found["compiler_cycles"] / chip.clock_ghz / 1e9
    assert 0.2 * estimate < found["compiler_cycles_roofline_s"] < estimate
