"""Conversations on meshes: the certificate, on rows of which the assistant's turns are learnt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chats import turns, write_folder

import jaxtrain
from jaxtrain.certificate import certify
from jaxtrain.certificate.layouts import Layout, experiment_on
from jaxtrain.certificate.shrink import shrink
from jaxtrain.data import Conversations, TokenizerFile
from jaxtrain.experiment import load_experiment

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "stdlib_lm.py"
SEQ = 64
SHARDED = Layout((("data", 2), ("fsdp", 2), ("tensor", 2)))
LAYOUTS = [
    SHARDED,
    Layout((("context", 4), ("tensor", 2)), loop="scanned, remat dots_and_attention"),
    Layout((("data", 2), ("context", 4)), "gspmd", loop="scanned, prefetch, remat full"),
    Layout((("data", 4), ("fsdp", 2)), "gspmd", precision="bf16", packing=False),
    Layout(
        (("fsdp", 2), ("stage", 2), ("context", 2)),
        pipeline="zero bubble",
        microbatches=4,
        periods=3,
    ),
    Layout((("tensor", 8),), "explicit, ring", "zero2", dropout=0.1),
]


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jaxtrain.Experiment:
    """A small model on conversations of very different lengths, in rows of their own tokenizer."""
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    words = [
        "how",
        "are",
        "you,",
        "I",
        "am",
        "fine;",
        "what",
        "is",
        "two",
        "plus",
        "two?",
        "it",
        "is",
        "four",
    ]
    random = np.random.default_rng(0)

    def said(most: int) -> str:
        return " ".join(random.choice(words, random.integers(1, most)))

    chats = [turns(said(12), said(3 if n % 3 else 9)) for n in range(64)]
    lines = "\n".join(json.dumps({"messages": chat}) for chat in chats)
    (tmp_path / "chats.jsonl").write_text(lines, encoding="utf-8")
    tokenizer = TokenizerFile(str(write_folder(tmp_path / "tokenizer", "gemma")), eos="</s>")
    source = Conversations(str(tmp_path / "chats.jsonl"), held_out=0.2)
    small = shrink(load_experiment(EXPERIMENT), devices=8)
    return replace(
        small,
        model=replace(small.model, vocab=448),
        data=jaxtrain.TextData(source, tokenizer, seq=SEQ),
    )


@pytest.mark.parametrize(
    "layout",
    [pytest.param(at, marks=[] if at is SHARDED else pytest.mark.slow) for at in LAYOUTS],
    ids=str,
)
def test_layouts_equal_one_device(
    layout: Layout, experiment: jaxtrain.Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certify, "layouts", lambda devices, which, **_: ([layout], 1))
    ((difference, _),) = certify.certify(experiment, full=True)
    assert difference.passed, str(difference)


def test_rows_learn_unequal_parts(experiment: jaxtrain.Experiment, tmp_path: Path) -> None:
    """Of what each device and microbatch has, so a mean of their means is another loss."""
    data = experiment_on(experiment, SHARDED).data
    rows = data.open("train", seed=0, cache_dir=tmp_path).rows(np.arange(16))
    learnt = rows["weights"].reshape(16, 4, -1).sum(axis=2)
    assert {*np.unique(rows["weights"])} == {0.0, 1.0}
    assert len({*learnt.sum(axis=1)}) > 4 and (learnt == 0).any() and learnt.sum() / 1024 > 0.1
    assert learnt.sum() / 1024 < 0.6, "prompts are not learnt"
