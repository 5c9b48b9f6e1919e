"""Initial states of layouts, compiled once where they are one program."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import pytest

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout
from jaxtrain.certificate.outcome import InitialPrograms
from jaxtrain.mesh.compiler_options import quick_to_compile

PAIR = Layout((("data", 2),), microbatches=1)


class Lowered(NamedTuple):
    """A lowered program that counts its compilations."""

    compiled: list[dict[str, Any]]
    text: str = "program"
    out_tree: str = "state"

    def as_text(self) -> str:
        return self.text

    def compile(self, compiler_options: dict[str, Any]) -> int:
        self.compiled.append(compiler_options)
        return len(self.compiled)


def test_an_initial_state_is_compiled_once_where_nothing_of_it_differs() -> None:
    programs, lowered = InitialPrograms(), Lowered([])

    def compiled(lowered: Any, options: dict[str, Any], axes: Any = PAIR.axes) -> Any:
        return programs.compile(PAIR._replace(axes=axes), lowered, options)

    assert compiled(lowered, {"fast": True}) == 1
    assert compiled(lowered._replace(text="another"), {"fast": True}) == 2
    assert compiled(lowered._replace(out_tree="another"), {"fast": True}) == 3
    assert compiled(lowered, {"fast": False}) == 4
    assert compiled(lowered, {"fast": True}, (("fsdp", 2),)) == 5
    assert compiled(lowered, {"fast": True}) == 1 and len(lowered.compiled) == 5


def test_layouts_of_a_certificate_share_initial_states(
    decoder: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch, fresh_programs: None
) -> None:
    quick_to_compile(jax.devices()[0])  # compiles too, the first time
    compiled: list[int] = []
    compile = jax.stages.Lowered.compile

    def counted(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
        compiled.append(1)
        return compile(lowered, **options)

    monkeypatch.setattr("os.cpu_count", lambda: 0)  # one after the other
    monkeypatch.setattr(jax.stages.Lowered, "compile", counted)
    two = [PAIR, PAIR._replace(precision="bf16")]
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: (two, 2))
    assert all(difference.passed for difference, _ in certify.certify(decoder, devices=2))
    assert len(compiled) == 2 * 4 + 2, "a step and an evaluation each, two initial states"
