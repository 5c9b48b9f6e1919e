"""The first and last lines of a run: its size, its result, and a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtrain.data import TextData, reference_bits
from jaxtrain.experiment import Sample
from jaxtrain.optim.precision import searched
from jaxtrain.run.result import Result
from jaxtrain.session.memory import parameter_counts
from jaxtrain.session.session import Session
from jaxtrain.weights.generate import generate


def headline(session: Session, last: int) -> str:
    """One line: model size, mesh, last step, compile time."""
    parameters = sum(parameter_counts(session.assembly).values())
    sizes = " x ".join(f"{a}={n}" for a, n in session.assembly.sizes.items()) or "one device"
    return (
        f"{session.beginning}{parameters / 1e6:.1f}M parameters on {sizes} "
        f"({session.assembly.mode}), {last} steps, compiled in {session.compile_s:.1f}s"
    )


def finish(result: Result, session: Session, tell: Callable[[str], None]) -> None:
    """Prints bits per byte beside reference compressors, and a sample; adds both to `result`. Says
    so if nothing was learnt."""
    e = session.experiment
    if result.history and all(line.get("loss", 0.0) is None for line in result.history):
        tell("NOTE no token of any batch had a weight above 0: nothing was learnt")
    if 0 < int(session.state.step) == int(session.state.skipped):
        searches = searched(e.precision.loss_scale) is not None
        tell(
            "NOTE no step had finite gradients, so each was skipped: nothing was learnt"
            + "; take more steps, which lower the loss scale" * searches
        )
    reached = result.evaluation.get("bits_per_byte")
    if reached is not None and isinstance(e.data, TextData) and e.data.has_text:
        bits = reference_bits(e.data)
        result.evaluation |= bits
        unigram, bigram = bits["unigram_bits_per_byte"], bits["bigram_bits_per_byte"]
        tell(
            f"held-out {reached:.3f} bits per byte = {reached / unigram:.0%} of the unigram "
            f"entropy {unigram:.3f}; an interpolated bigram model reaches {bigram:.3f}"
        )
    if e.sample is not None:
        result.sample = _sample_text(session, e.sample)
        answers = f", the answer to {e.sample.prompt!r}" if e.sample.chat else ""
        tell(f"--- {e.sample.tokens} tokens at temperature {e.sample.temperature}{answers}")
        tell(result.sample)


def _sample_text(session: Session, sample: Sample) -> str:
    """Returns the prompt and what follows, or the answer to it."""
    drawn: Any = dict(tokens=sample.tokens, temperature=sample.temperature)
    drawn |= dict(seed=session.experiment.seed)
    if sample.chat:
        return generate(session, [{"role": "user", "content": sample.prompt}], **drawn)
    return sample.prompt + generate(session, sample.prompt, **drawn)
