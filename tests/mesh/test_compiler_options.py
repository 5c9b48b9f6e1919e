"""Options for programs that are compiled for longer than they run."""

from __future__ import annotations

import jax

from jaxtrain.mesh.compiler_options import QUICK_TO_COMPILE, option_violations, quick_to_compile


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
