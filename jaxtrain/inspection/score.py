"""The log-probability of each token of texts, by a saved run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxtrain.experiment.reading import Trust
from jaxtrain.experiment.stored import ForeignField, stored_field
from jaxtrain.inspection.given import GivenRows
from jaxtrain.inspection.opened import (
    directory_of,
    kept_vocabulary,
    mesh_spec,
    row_length,
    stored_model,
)
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.scoring.ended import WEIGHTS, Ended
from jaxtrain.scoring.score_step import make_score_step
from jaxtrain.scoring.texts import FIELDS
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.session.rows import open_split
from jaxtrain.step.layer_order import AtRest
from jaxtrain.step.pipeline import evaluated_at_once
from jaxtrain.step.train_step import make_evaluation_step
from jaxtrain.tokenizers.assistant_turns import Messages
from jaxtrain.tokenizers.chat import ChatEncoder, Conversation, checked_messages
from jaxtrain.tokenizers.protocol import document_start
from jaxtrain.violations import raise_violations


class Scored(NamedTuple):
    """ids: of a text. log_probs: [ids] fp32, the natural logarithm of each one's probability after
    those before it; nan for the first, before which there is none."""

    ids: list[int]
    log_probs: np.ndarray

    @property
    def total(self) -> float:
        """The log-probability of the text after its first token."""
        return float(np.sum(self.log_probs[1:], dtype=np.float64))


def score(
    run: str | Path,
    texts: Sequence[str | Sequence[int] | Messages],
    *,
    mesh: MeshSpec | str | Path | None = None,
    averaged: bool | None = None,
    microbatches: int | None = None,
    trust: Trust = (),
) -> list[Scored]:
    """Returns the log-probability of each token of texts, by the model of a saved run: the numbers
    of which training without dropout sums its loss, to the bit on the same mesh and rows.

    run: RUN or RUN@STEP, a run directory and a saved step, its newest if none is given. texts:
    texts, which the run's tokenizer encodes as a document begins; lists of messages, which its chat
    template makes text as in training; or their ids. Each has a row of its own and at most the
    run's `seq` + 1 tokens. mesh: None for one device. averaged: the
    averaged weights; None where the run keeps any. microbatches: parts of a batch that are on the
    mesh one after another, None as in the run. trust: modules of your own that the run may name; of
    a model of your own, the negative of what its `loss` gives for the token. Raises ValueError for
    what does not fit, and DamagedCheckpoint. For one process.
    """
    if isinstance(texts, str):
        raise ValueError(f"texts={texts!r} is one text; give a list of them: [{texts!r}]")
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise ValueError(
            f"texts is a {type(texts).__name__}; give a list of texts, lists of messages, or ids"
        )
    path, listed_texts = directory_of(run)[0], list(texts)
    if _is_conversation(listed_texts):
        raise ValueError("texts is one conversation; give a list of them: [messages]")
    has_messages = any(map(_is_conversation, listed_texts))
    has_text = has_messages or any(isinstance(text, str) for text in listed_texts)
    vocabulary: Any = kept_vocabulary(path, trust) if has_text else None
    with ExitStack() as stack:
        chat = stack.enter_context(ChatEncoder(vocabulary)) if has_messages else None
        listed = [_ids(n, text, vocabulary, chat) for n, text in enumerate(listed_texts)]
    data, model = (stored_field(path, name, trust=trust) for name in ("data", "model"))
    seq = row_length(data, path)
    raise_violations(_violations(listed, seq, getattr(model, "vocab", None)), "texts")
    if not listed:
        return []
    more: Any = dict(averaged=averaged, microbatches=microbatches, trust=trust)
    losses = score_rows(run, rows_of(listed, seq), mesh=mesh, **more)
    return [
        Scored(ids, np.append(np.float32(np.nan), -row[: len(ids) - 1]))
        for ids, row in zip(listed, losses, strict=True)
    ]


def _is_conversation(text: Any) -> bool:
    return isinstance(text, list | tuple) and any(isinstance(part, Mapping) for part in text)


def _ids(number: int, text: Any, vocabulary: Any, chat: ChatEncoder | None) -> list[int]:
    """Returns the ids of a text as a document begins, of a conversation, or of ids. Raises
    ValueError for none of them."""
    if chat is not None and _is_conversation(text):
        try:
            return chat.encode(Conversation(checked_messages(text))).ids.tolist()
        except ValueError as error:
            raise ValueError(f"text {number}: {error}") from error
    if isinstance(text, str):
        return document_start(vocabulary, text)
    ids = np.asarray(text)
    if ids.ndim != 1 or not (np.issubdtype(ids.dtype, np.integer) or ids.size == 0):
        raise ValueError(
            f"text {number} is {text!r}; give a text, a list of messages, or ids as whole numbers"
        )
    return ids.tolist()


def _violations(texts: Sequence[Sequence[int]], seq: int, vocab: int | None) -> list[str]:
    """Returns a violation for each text that is no row of the run."""
    violations = []
    for number, ids in enumerate(texts):
        if not 2 <= len(ids) <= seq + 1:
            tokens = f"{len(ids)} token{'s' * (len(ids) != 1)}"
            remedy = "longer one" if len(ids) < 2 else "shorter one, or its parts"
            violations.append(
                f"text {number} has {tokens}, and a row scores 2 to {seq + 1}; give a {remedy}"
            )
        if vocab is not None and ids and not 0 <= min(ids) <= max(ids) < vocab:
            beyond = next(i for i in ids if not 0 <= i < vocab)
            violations.append(f"text {number} has the id {beyond}; give ids from 0 to {vocab - 1}")
    return violations


def rows_of(texts: Sequence[Sequence[int]], seq: int) -> dict[str, np.ndarray]:
    """Returns rows of `seq` tokens, [texts, seq] by field, in which each text stands alone."""
    rows = {name: np.zeros((len(texts), seq), dtype) for name, dtype in FIELDS.items()}
    for row, ids in enumerate(texts):
        length = len(ids) - 1
        values = (ids[:-1], ids[1:], np.ones(length), np.ones(length), np.arange(length))
        for name, of_text in zip(FIELDS, values, strict=True):
            rows[name][row, :length] = of_text
    return rows


def score_rows(
    run: str | Path,
    rows: Mapping[str, np.ndarray],
    *,
    mesh: MeshSpec | str | Path | None = None,
    averaged: bool | None = None,
    microbatches: int | None = None,
    isolate_documents: bool | None = None,
    trust: Trust = (),
) -> np.ndarray:
    """Returns the loss of each token of rows, in nats and unweighted, [rows, seq] fp32; meaningless
    where a token has weight 0.

    rows: arrays [rows, ...] by field, as a dataset's `rows` returns them. isolate_documents: True
    where documents see only themselves; None as in the run's data. The others as for `score`.
    """
    if jax.process_count() > 1:
        raise ValueError("tokens are scored by one process, and this is one of several")
    spec, data = mesh_spec(mesh), data_of_rows(run, rows, isolate_documents, trust)
    if len(data) == 0:
        return np.zeros((0, data.seq), np.float32)
    more: Any = dict(averaged=averaged, microbatches=microbatches, trust=trust)
    stored = stored_model(run, data, **more)
    dataset = open_split(stored.experiment, "train", Path())
    dataset.rows(np.arange(len(dataset)))  # ids beyond the vocabulary are refused now
    assembly, devices = stored.on(spec, dataset)
    weights = WEIGHTS if assembly.description is None else assembly.description.weights
    if weights not in assembly.fields:
        raise ValueError(
            f"the rows have no {weights}, the field by which a loss is multiplied and which tells "
            "the losses of tokens apart; add ones, float32"
        )
    at_once = evaluated_at_once(assembly)
    size = at_once * assembly.largest_batch // assembly.experiment.microbatches
    placed = assembly.placed(Ended(dataset, weights), devices, at_once)
    step = jax.jit(make_score_step(assembly, devices, weights))
    total = jax.jit(make_evaluation_step(assembly, devices))
    state = stored.state(AtRest(assembly, devices))
    params = Evaluator(assembly, devices, cache_dir=Path()).params(state)
    parts = []
    for first in range(0, len(dataset), size):
        batch = placed.rows(np.minimum(np.arange(first, first + size), len(dataset)))
        arguments = (params, state.model_state, batch)
        losses = np.asarray(step(*arguments))
        if first == 0 and assembly.description is None:
            _refuse_other_loss(losses, np.asarray(batch[weights]), float(total(*arguments).loss))
        parts.append(losses.reshape(-1, *losses.shape[2:]))
    losses, order = np.concatenate(parts)[: len(dataset)], assembly.row_orders.get(weights)
    return losses if order is None else losses[:, np.argsort(order)]


def data_of_rows(
    run: str | Path, rows: Mapping[str, Any], isolate_documents: bool | None, trust: Trust
) -> GivenRows:
    """Returns rows as data, with the run's own `isolate_documents` (True if its data is not known
    here) if that is None. Raises ValueError as `_arrays`, and where there is no run."""
    arrays, path = _arrays(rows), directory_of(run)[0]
    if isolate_documents is None:
        try:
            data = stored_field(path, "data", trust=trust)
        except ForeignField:
            data = None
        isolate_documents = getattr(data, "isolate_documents", True)
    return GivenRows(arrays, isolate_documents, next(iter(arrays.values())).shape[1])


def _arrays(rows: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns rows as arrays, weights as fp32. Raises ValueError for what are no rows."""
    if not isinstance(rows, Mapping) or not rows:
        raise ValueError(f"rows is a {type(rows).__name__}; give arrays [rows, ...] by field")
    arrays = {name: np.asarray(values) for name, values in rows.items()}
    if WEIGHTS in arrays:
        arrays[WEIGHTS] = arrays[WEIGHTS].astype(np.float32)
    shapes = {name: values.shape for name, values in arrays.items()}
    if len({shape[:1] for shape in shapes.values()}) > 1 or min(map(len, shapes.values())) < 2:
        raise ValueError(f"rows has fields of shapes {shapes}; give [rows, ...], as many of each")
    return arrays


def _refuse_other_loss(losses: np.ndarray, weights: np.ndarray, total: float) -> None:
    """Raises ValueError where a user's loss is not the sum of the losses of tokens, each multiplied
    by its weight."""
    expected = float(np.sum(losses.astype(np.float64) * weights))
    if not np.isclose(expected, total, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"the model's loss is {total:g}, and the losses of its tokens times their weights add "
            f"to {expected:g}: a token's loss can be told only where `loss` returns the sum of all "
            "losses, each multiplied by batch['weights']"
        )
