"""Options for programs that are compiled for longer than they run, and those of shipped meshes."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxtrain.mesh.compiler_options import (
    FP8_KERNELS,
    KEEP_BARRIERS,
    QUICK_TO_COMPILE,
    option_violations,
    quick_to_compile,
    with_defaults,
)
from jaxtrain.mesh.mesh import load_mesh

SHIPPED = [load_mesh(path) for path in sorted(Path("meshes").glob("*.toml"))]
GPUS = [spec for spec in SHIPPED if spec.compiler_options and spec.chip.platform == "gpu"]


def test_the_compiler_gets_those_that_it_takes() -> None:
    device = jax.devices()[0]
    chosen = quick_to_compile(device)
    assert option_violations(chosen, device) == []
    assert chosen["xla_backend_optimization_level"] == 0
    for name in QUICK_TO_COMPILE.keys() - chosen.keys():
        (told,) = option_violations({name: QUICK_TO_COMPILE[name]}, device)
        assert "is unknown to the compiler" in told


class Absent:
    platform = "tpu"


def test_other_platforms_compile_as_ever() -> None:
    assert quick_to_compile(Absent()) == {}


OF_GPUS = {spec.name: dict(spec.compiler_options) for spec in GPUS} | {"fp8": FP8_KERNELS}


@pytest.mark.parametrize("name", OF_GPUS)
def test_options_for_gpus_are_known_by_this_version(name: str) -> None:
    """One compiler reads the options of CPU and GPU, and refuses a name that it does not know."""
    lowered = jax.jit(jnp.negative).lower(jnp.ones(8))
    lowered.compile(compiler_options=OF_GPUS[name])
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        lowered.compile(compiler_options={**OF_GPUS[name], "xla_gpu_never": 1})


def test_what_a_mesh_disables_stays_disabled() -> None:
    passes = "xla_disable_hlo_passes"
    assert with_defaults({}, "cpu", fp8=True) == {passes: KEEP_BARRIERS}
    also = with_defaults({passes: "a,b", "xla_c": 1}, "cpu", fp8=False)
    assert also == {passes: f"a,b,{KEEP_BARRIERS}", "xla_c": 1}
    assert with_defaults({passes: "a"}, "gpu", fp8=True) == {passes: "a", **FP8_KERNELS}
