"""The checks of shapes and types that tests run under: they are on, and they can fail."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from house import bare_any
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, TypeCheckError
from typecheck import PACKAGES, checked, unchecked

from jaxtrain.attention.kernels import Reference
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.rotary.rope import Rope, rotate
from jaxtrain.collectives.matmul import gather_matmul
from jaxtrain.collectives.ring import Ring, take
from jaxtrain.nn.norm import Norm, RMSNorm
from jaxtrain.optim.muon import newton_schulz
from jaxtrain.optim.optimizer import AdamW
from jaxtrain.pipeline.layout import StageLayout

ROOT = Path(__file__).parents[1]

X = jnp.zeros((2, 8, 4, 6))
TABLE = jnp.zeros((1, 8, 3))
WRONG = {
    "a dim of another size": lambda: rotate(X, TABLE, TABLE[:, :7]),
    "half of head_dim": lambda: rotate(X, *[jnp.zeros((1, 8, 6))] * 2),
    "too few dims": lambda: newton_schulz(jnp.zeros(3)),
    "another dtype": lambda: newton_schulz(jnp.zeros((3, 3), int)),
    "a method": lambda: Reference()(X, X[:, :7], X, None, Scoring(AttentionMask(), 1.0)),
    "of a leaf": lambda: StageLayout(4, 2).from_chunks(jnp.zeros(3)),
    "no array": lambda: Norm(RMSNorm(), 3)([1.0, 2.0, 3.0]),
    "no whole number": lambda: take(X, 0.5, 2, 0),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_what_an_annotation_forbids_is_refused(call):
    with pytest.raises(TypeCheckError, match="Type-check error whilst checking the parameters of"):
        call()


def test_a_wrong_result_is_refused_too():
    class Longer:
        attention_scaling = 1.0

        def scaled(self, frequencies: np.ndarray, theta: float, seq: int) -> list[float]:
            return list(frequencies)

    with pytest.raises(TypeCheckError, match="return value of"):
        Rope(scaling=Longer()).frequencies(8, 16)


def test_shapes_are_checked_while_a_program_is_traced_and_are_a_device_s_own():
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])

    def products(x: jax.Array, w: jax.Array) -> jax.Array:
        return gather_matmul(x, (w,), ("tensor",), Ring())[0]

    specs = dict(in_specs=(P("tensor"), P()), out_specs=P(None, "tensor"))
    run = jax.jit(jax.shard_map(products, mesh=mesh, **specs))
    assert run(jnp.ones((4, 6)), jnp.ones((6, 3))).shape == (4, 6)
    with pytest.raises(TypeCheckError, match="gather_matmul"):
        run(jnp.ones((4, 6)), jnp.ones((5, 3)))


def test_a_function_can_be_had_without_and_looks_the_same_with_it():
    assert unchecked(rotate) is not rotate
    assert inspect.signature(rotate) == inspect.signature(unchecked(rotate))
    assert inspect.isfunction(rotate) and inspect.getdoc(rotate).startswith("Returns x turned by")
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rat'"):
        AdamW(learning_rat=1e-3)


def scaling(by: int):
    """A function within a function, as the import hook decorates it."""

    @jaxtyping.jaxtyped(typechecker=checked)
    def scaled(
        x: Float[Array, "rows columns"], again: bool = False
    ) -> Float[Array, "columns rows"]:
        if again:
            return scaling(by + 1)(x)
        return x.T * by if by else x

    return scaled


def test_functions_within_functions_are_each_checked_and_called():
    twice, thrice, wrong = scaling(2), scaling(3), scaling(0)
    x = jnp.ones((2, 3))
    for _ in range(2):
        assert (float(twice(x).sum()), float(thrice(x).sum())) == (12.0, 18.0)
        assert float(twice(x, again=True).sum()) == 18.0
        with pytest.raises(TypeCheckError, match=r"return value of .*scaling.<locals>.scaled"):
            wrong(x)
        with pytest.raises(TypeCheckError, match="parameters of"):
            thrice(x[0])
    assert unchecked(twice).__closure__ and inspect.signature(twice).parameters.keys() == {
        "x",
        "again",
    }


def test_parameters_say_what_they_take():
    bare, annotated = bare_any(ROOT / "jaxtrain")
    assert bare <= 0.04 * annotated, "python tests/house.py counts them"


def test_outside_the_tests_nothing_is_checked():
    script = (
        "import sys, jax.numpy as jnp\n"
        "from jaxtrain.optim.muon import newton_schulz\n"
        "assert newton_schulz(jnp.zeros((3, 3), int)).shape == (3, 3)\n"
        "assert not hasattr(newton_schulz, '__wrapped__') and 'beartype' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=6000)
    assert len(PACKAGES) == 7
