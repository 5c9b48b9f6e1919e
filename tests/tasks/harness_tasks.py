"""Task files of our own, of each kind that compares log-probabilities, and a small run of text."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import jaxtrain
from jaxtrain.data import BpeTokenizer

WORDS = ("the cat sat on the mat", "a dog says woof", "a cat says meow", "the dog ran to the log")
QUESTIONS = [
    {"question": "a dog says", "choices": ["woof", "meow", "log"], "answer": 0},
    {"question": "a cat says ", "choices": ["woof", "meow"], "answer": 1},
    {"question": "the cat sat on", "choices": ["the log and the mat", "the mat"], "answer": 1},
]
TEXTS = [{"text": text} for text in (*WORDS, "naïve cats, " * 30 + "and the end")]
KINDS: dict[str, dict[str, Any]] = {
    "animals": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "last_words": {
        "output_type": "loglikelihood",
        "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' ' + text.split(' ')[-1]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "whole_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "metric_list": [{"metric": "exact_match"}],
    },
}


TOKENIZER = BpeTokenizer(270)


def write_tasks(folder: Path) -> Path:
    """Writes the task files into a folder, and returns it."""
    folder.mkdir(parents=True)
    for name, kind in KINDS.items():
        rows = QUESTIONS if "question" in kind["doc_to_text"] else TEXTS
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **kind,
        }
        # A JSON document is a YAML one.
        (folder / f"{name}.yaml").write_text(json.dumps(task))
    return folder


def words_experiment(
    folder: Path, tokenizer: Any = TOKENIZER, *, vocab: int = 280, **more: Any
) -> jaxtrain.Experiment:
    """Returns the training of a small decoder of the form of Llama on `WORDS`."""
    folder.mkdir(exist_ok=True)
    (folder / "words.txt").write_text("\n\n".join(WORDS * 40))
    block = jaxtrain.BlockConfig(
        jaxtrain.AttentionConfig(heads=2, head_dim=8), jaxtrain.MlpConfig(hidden=32)
    )
    model = jaxtrain.DecoderConfig(vocab=vocab, embed=16, layers=2, period=(block,))
    source = jaxtrain.TextFiles(str(folder / "words.txt"), separator="\n\n")
    fields: dict[str, Any] = dict(
        data=jaxtrain.TextData(source, tokenizer, seq=48),
        optimizer=jaxtrain.AdamW(1e-2),
        steps=20,
        batch=8,
        evaluation=None,
        logging=jaxtrain.Logging(tensorboard=False),
    )
    return jaxtrain.Experiment(model=model, **{**fields, **more})


def train_words(folder: Path, *arguments: Any, **more: Any) -> Path:
    """Trains `words_experiment`, and returns the run."""
    experiment = words_experiment(folder, *arguments, **more)
    run, stream = folder / "run", io.StringIO()
    jaxtrain.train(experiment, "cpu_1", run_dir=run, cache_dir=folder / "cache", stream=stream)
    return run
