"""Chunks of the head, where nobody says how large: by the chip's peaks, in its program and plan."""

from __future__ import annotations

import itertools

import pytest

from jaxtrain import load_mesh
from jaxtrain.mesh.hardware import CHIPS
from jaxtrain.mesh.head_chunk import LEAST_CHUNK, chunk_tokens_of
from jaxtrain.planner.assembled import facts_of
from jaxtrain.session.check import check
from jaxtrain.step.communicators import explicit_communicator

VOCABULARIES = (1024, 32_000, 128_256, 256_000)


def test_a_chunk_is_the_least_that_does_not_wait_for_its_gradient_to_be_added() -> None:
    """The share of time that a chunk of c tokens waits, as 8 bytes of memory against 6 c products'
    FLOPs of an element of the gradient; or a chunk of twice the tokens has no room."""
    grown = 0
    for chip, columns in itertools.product(CHIPS.values(), VOCABULARIES):
        tokens = chunk_tokens_of(chip, columns)

        def waits(tokens: int, chip=chip) -> bool:
            memory = 8 / (chip.hbm_bandwidth_gbytes * 1e9)
            return memory / (6 * tokens / chip.bf16_flops) > 1 / 8

        logits = 4 * tokens * columns / (chip.hbm_gbytes * 1e9)
        assert tokens >= LEAST_CHUNK and tokens & (tokens - 1) == 0
        assert not waits(tokens) or 2 * logits > 1 / 20, (chip.name, columns)
        if tokens > LEAST_CHUNK:
            grown += 1
            assert waits(tokens // 2) and logits <= 1 / 20, (chip.name, columns)
    assert grown > 5


@pytest.mark.parametrize(("mesh", "tokens"), [("h100_64", 4096), ("v5p_512", 2048)])
def test_plan_and_program_have_the_chips_chunks(mesh: str, tokens: int) -> None:
    assembly = check("experiments/llama3_8b.py", f"meshes/{mesh}.toml", data_here=False).assembly
    assert assembly.chunk_tokens == tokens
    assert explicit_communicator(assembly).chunk_tokens == tokens
    facts = facts_of(assembly)
    assert facts.chunks * tokens == facts.tokens
    assert load_mesh(f"meshes/{mesh}.toml").chip.name in CHIPS
