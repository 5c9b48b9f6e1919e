"""Tiny experiments for the tests of training: compile time is their cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache.compilation_cache import reset_cache

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout
from jaxtrain.certificate.outcome import Outcome, Program
from jaxtrain.cluster.phases import Phases
from jaxtrain.data import BigramChain
from jaxtrain.mesh.mesh import make_mesh
from jaxtrain.session.session import Session, open_session
from jaxtrain.step.assembly import active_mesh, assemble
from jaxtrain.step.layer_order import AtRest

VOCAB, SEQ, BATCH = 16, 8, 8


@dataclass(frozen=True)
class Poisoned:
    """A corpus with an infinite weight in row `row`: that step's gradient is not finite."""

    corpus: Any
    row: int

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        dataset = self.corpus.open(split, seed=seed, cache_dir=cache_dir)
        clean = dataset.rows

        def rows(indices: np.ndarray) -> dict[str, np.ndarray]:
            batch = clean(indices)
            batch["weights"][np.asarray(indices) == self.row, 0] = np.inf
            return batch

        dataset.rows = rows
        return dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "corpus"), name)


@pytest.fixture
def poisoned() -> type[Poisoned]:
    """(corpus, row) -> the corpus with that row poisoned."""
    return Poisoned


class Asking(jaxtrain.Callback):
    """Calls `ask` at each `event`, and has the run stop when it says so."""

    def __init__(self, ask: Callable[[], Any], event: str = "after_step") -> None:
        self.ask = ask
        setattr(self, event, self.called)

    def called(self, run: jaxtrain.Run, *_: Any) -> None:
        if self.ask():
            run.stop()


class Table(nnx.Module):
    """A bigram table factored through 8 dims: a user's own model that compiles at once."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inward = nnx.Param(
            jax.random.normal(rngs.params(), (VOCAB, 8)) * 0.3, axes=("vocab", "embed")
        )
        self.outward = nnx.Param(
            jax.random.normal(rngs.params(), (8, VOCAB)) * 0.3, axes=("embed", "vocab")
        )

    def loss(self, batch: dict[str, jax.Array], *, key: Any) -> tuple[jax.Array, jax.Array]:
        inward, outward = self.inward[...], self.outward[...]
        logits = inward[batch["tokens"]] @ outward
        chosen = jnp.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
        lost = jax.nn.logsumexp(logits, axis=-1) - chosen
        return jnp.sum(lost * batch["weights"]), jnp.sum(batch["weights"])


def table(rngs: nnx.Rngs) -> Table:
    return Table(rngs)


@pytest.fixture
def own() -> jaxtrain.Experiment:
    """A user's own model on a bigram chain."""
    return jaxtrain.Experiment(
        model=table,
        data=BigramChain(vocab=VOCAB, seq=SEQ, successors=2),
        optimizer=jaxtrain.SGD(0.5, momentum=0.0, weight_decay=0.0),
        steps=20,
        batch=BATCH,
        clip_norm=None,
        evaluation=None,
        checkpoints=None,
        logging=jaxtrain.Logging(every=1, tensorboard=False),
    )


@pytest.fixture
def decoder(own: jaxtrain.Experiment) -> jaxtrain.Experiment:
    """A decoder of one layer on the same data."""
    block = jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=2, head_dim=4), jaxtrain.MlpConfig(hidden=16)
    )
    model = jaxtrain.DecoderConfig(
        vocab=VOCAB, embed=8, layers=1, period=(block,), tied=True, vocab_multiple=16
    )
    return replace(own, model=model, optimizer=jaxtrain.AdamW(3e-2))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Session]]:
    """open_session on mesh axes; closed after the test."""
    sessions = []

    def session(
        experiment: jaxtrain.Experiment, *, phases: Phases | None = None, **axes: int
    ) -> Session:
        mesh = jaxtrain.mesh_from_axes(**axes) if axes else jaxtrain.mesh_from_axes(data=1)
        cache_dir = tmp_path / "cache"
        sessions.append(open_session(experiment, mesh, cache_dir=cache_dir, phases=phases))
        return sessions[-1]

    yield session
    for session in sessions:
        session.close()


def at_rest(experiment: Any, **axes: int) -> AtRest:
    """How the experiment's state is placed on a mesh of these axes; nothing is compiled."""
    spec = jaxtrain.mesh_from_axes(**(axes or {"data": 1}))
    assembly = assemble(experiment, spec)
    return AtRest(assembly, active_mesh(make_mesh(spec), assembly.sizes))


@pytest.fixture
def stepped() -> Callable[[Session], dict[str, float]]:
    """Take the session's next step; its metrics as numbers."""

    def step(session: Session) -> dict[str, float]:
        metrics = session.step(session.loader.next()[1])
        return {name: float(value) for name, value in metrics.items()}

    return step


@pytest.fixture(scope="session")
def one_device_runs() -> dict[Any, Any]:
    """Certificates' references by layout: they communicate nothing, so no mutation changes them."""
    return {}


@pytest.fixture
def fresh_programs() -> Iterator[None]:
    """Compile, whatever the cache of programs holds. On a mesh of several axes an evaluation in a
    pipeline hangs when XLA:CPU has loaded it from there (jaxlib 0.10 to 0.12), not as compiled:
    devices enter collectives that do not wait for each other in different orders."""
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    reset_cache()


@pytest.fixture
def remembered(
    one_device_runs: dict[Any, Any], fresh_programs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Certify with references that an earlier test has run."""
    compile_program = certify.program

    def once(experiment: jaxtrain.Experiment, layout: Layout, *_: Any) -> Program:
        if layout != layout.reference():
            return compile_program(experiment, layout)
        key = (repr(experiment), layout)
        compiled = None if key in one_device_runs else compile_program(experiment, layout)

        def run() -> Outcome:
            if compiled is not None:
                one_device_runs[key] = compiled()
            return one_device_runs[key]

        return run

    monkeypatch.setattr(certify, "program", once)
