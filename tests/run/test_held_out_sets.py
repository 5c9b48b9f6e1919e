"""Several held-out sets of one experiment, each under its name."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import jaxtrain
from jaxtrain.checkpoint.policy import Best, Keep
from jaxtrain.data import (
    BigramChain,
    BpeTokenizer,
    ByteTokenizer,
    Conversations,
    JsonLines,
    TextFiles,
    TokenizerFile,
)
from tests.chats import write_folder

TEXTS = [f"{n} words, of which {n % 7} are short and {n % 5} long." for n in range(60)]
CODE = [f"def f{n}(x): return x + {n}" for n in range(40)]


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    (tmp_path / "code.txt").write_text("\n\n".join(CODE))
    lines = [json.dumps({"text": text}) for text in CODE[:20]]
    (tmp_path / "code.jsonl").write_text("\n".join(lines))
    return tmp_path


def source(path: Path, **more: Any) -> TextFiles:
    return TextFiles(str(path), separator="\n\n", **more)


def of_sets(
    decoder: jaxtrain.Experiment, files: Path, sets: Any, **more: Any
) -> jaxtrain.Experiment:
    """Three steps on the texts, each evaluated on `sets` too."""
    own = jaxtrain.TextData(source(files / "texts.txt", held_out=0.2), BpeTokenizer(300), seq=8)
    fields = dict(
        model=replace(decoder.model, vocab=300),
        data=own,
        steps=3,
        checkpoints=jaxtrain.SavePolicy(every=1),
        evaluation=jaxtrain.Evaluation(every=1, batches=None, sets=sets),
        logging=jaxtrain.Logging(every=1, tensorboard=False),
    )
    return replace(decoder, **fields | more)


def train(experiment: jaxtrain.Experiment, run: Path, **more: Any) -> tuple[Any, str]:
    told = io.StringIO()
    more = dict(run_dir=run, cache_dir=run.parent / "cache", stream=told) | more
    return jaxtrain.train(experiment, "cpu_1", **more), told.getvalue()


def test_sets_are_encoded_by_the_experiment_s_tokenizer_and_named_in_metrics(
    decoder: jaxtrain.Experiment, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as `jaxtrain.evaluate` reads those files, to the bit; later told where they change."""
    sets = {
        "files": str(files / "code.txt"),
        "lines": JsonLines(str(files / "code.jsonl")),
        "half": jaxtrain.TextData(
            source(files / "code.txt", held_out=0.5), BpeTokenizer(300), seq=8
        ),
    }
    wrong = of_sets(decoder, files, sets)
    with pytest.raises(ValueError, match=r"sets\['half'\]: the tokenizer of this data.*TextFiles"):
        train(wrong, files / "wrong")
    assert not (files / "wrong").exists()
    del sets["half"]
    keeps = Keep(1, best=Best("eval_loss/lines", greatest=True))
    saves = jaxtrain.SavePolicy(every=1, keep=keeps)
    experiment = of_sets(decoder, files, sets, checkpoints=saves)
    result, told = train(experiment, files / "run", steps=2)
    assert "NOTE" not in told
    values = result.evaluation
    cache = dict(cache_dir=files / "cache")
    for name, path in (("files", files / "code.txt"), ("lines", files / "code.jsonl")):
        for metric, value in jaxtrain.evaluate(files / "run", path, **cache).items():
            assert values[f"{metric}/{name}"] == value
    assert values["eval_loss/files"] != values["eval_loss/lines"] != values["eval_loss"]
    evaluated = jaxtrain.evaluate(files / "run", **cache)
    assert evaluated.items() <= values.items() and len(evaluated) == 6
    alone = jaxtrain.evaluate(files / "run", split="held_out", **cache)
    assert {*alone} == {"eval_loss", "bits_per_byte"} and alone.items() <= values.items()
    lines = [
        json.loads(line) for line in (files / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert lines[-1]["eval_loss/files"] == pytest.approx(values["eval_loss/files"])
    assert "eval_loss/files" in repr(result.history)
    assert [p.name for p in (files / "run" / "checkpoints").glob("[0-9]*")]
    (files / "code.jsonl").write_text(json.dumps({"text": CODE[0] * 2}))
    with pytest.warns(UserWarning, match="held-out set lines are not those of step 2"):
        changed = jaxtrain.evaluate(files / "run", **cache)
    assert changed["eval_loss/files"] == values["eval_loss/files"]
    assert changed["eval_loss/lines"] != values["eval_loss/lines"]
    _, told = train(experiment, files / "run")
    assert told.count("NOTE") == 1
    assert "NOTE the held-out set lines is not that of step 2: its eval_loss/lines" in told


def test_sets_that_cannot_be_read_are_refused_together_before_a_run_begins(
    decoder: jaxtrain.Experiment, files: Path, tmp_path: Path
) -> None:
    sets = {"none": str(tmp_path / "none.txt"), "lines": JsonLines(str(tmp_path / "no.jsonl"))}
    experiment = of_sets(decoder, files, sets)
    lines = r"sets\['none'\].*none\.txt.*sets\['lines'\].*no\.jsonl"
    with pytest.raises(ValueError, match=f"(?s){lines}"):
        jaxtrain.check(experiment, "cpu_1")
    with pytest.raises(ValueError, match=f"(?s){lines}"):
        train(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    no_text = replace(decoder, evaluation=jaxtrain.Evaluation(sets={"code": "code.txt"}))
    with pytest.raises(ValueError, match=r"sets\['code'\]: the data of this experiment is a Bigra"):
        jaxtrain.check(no_text, "cpu_1")
    other = BigramChain(decoder.data.vocab, decoder.data.seq + 1)
    longer = replace(decoder, evaluation=jaxtrain.Evaluation(sets={"longer": other}))
    with pytest.raises(ValueError, match=r"sets\['longer'\]: it has seq=9, and the experi"):
        jaxtrain.check(longer, "cpu_1")
    best = jaxtrain.SavePolicy(every=1, keep=Keep(best=Best("eval_loss/text")))
    unnamed = of_sets(decoder, files, {"code": str(files / "code.txt")}, checkpoints=best)
    with pytest.raises(ValueError, match=r"an evaluation has eval_loss.* or eval_loss/code"):
        jaxtrain.check(unnamed, "cpu_1")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ("code.txt", "sets='code.txt' is no dict"),
        ({"a b": "x"}, "has the name 'a b'"),
        ({"": "x"}, "has the name ''"),
        ((("a", "x"), ("a", "y")), "two of the name 'a'"),
        ({"a": 3}, r"sets\['a'\]=3 cannot be read"),
        ({"a": TextFiles}, "cannot be read"),
        ({"a": ()}, "cannot be read"),
    ],
)
def test_what_is_no_set_is_refused(sets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jaxtrain.Evaluation(sets=sets)
    assert jaxtrain.Evaluation(sets={"a": ["x", "y"]}).sets == (("a", ("x", "y")),)
    assert jaxtrain.Evaluation(sets=[("a", "x")]).sets == (("a", "x"),)


def test_an_untouched_set_is_the_same_by_every_tokenizer(
    decoder: jaxtrain.Experiment, files: Path
) -> None:
    """Those that a run keeps in another form have the ids, and the digest, that it trained with."""
    chat = TokenizerFile(str(write_folder(files / "chat", "gemma")))
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    (files / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    for number, tokenizer in enumerate((ByteTokenizer(), chat)):
        sets: dict[str, Any] = {
            "files": files / "code.txt",
            "lines": JsonLines(str(files / "code.jsonl")),
        }
        sets |= {"chats": Conversations(str(files / "chats.jsonl"))} if number else {}
        experiment = of_sets(decoder, files, sets, model=replace(decoder.model, vocab=400))
        experiment = replace(experiment, data=replace(experiment.data, tokenizer=tokenizer, seq=32))
        result, _ = train(experiment, files / f"run{number}", steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            values = jaxtrain.evaluate(files / f"run{number}", cache_dir=files / "cache")
        assert values.items() <= result.evaluation.items() and len(values) == 2 + 2 * len(sets)


@dataclass(frozen=True)
class Lines:
    """Rows that are no text, or what `error` is."""

    error: type[Exception] | None = None

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Any:
        if self.error is not None:
            raise self.error(split)
        return BigramChain(300, 8, isolate_documents=True).open(
            split, seed=seed, cache_dir=cache_dir
        )


def test_data_of_one_s_own_has_sets_and_is_one(decoder: jaxtrain.Experiment, files: Path) -> None:
    text = jaxtrain.TextData(source(files / "code.txt", held_out=0.5), ByteTokenizer(), seq=8)
    own = of_sets(decoder, files, {"text": text, "lines": Lines()}, data=Lines())
    result, _ = train(own, files / "run", steps=1)
    values = jaxtrain.evaluate(files / "run", cache_dir=files / "cache", trust=__name__)
    assert values.items() <= result.evaluation.items()
    assert {*values} == {"eval_loss", "eval_loss/text", "bits_per_byte/text", "eval_loss/lines"}
    broken = of_sets(decoder, files, {"lines": Lines(KeyError)})
    with pytest.raises(KeyError) as caught:
        train(broken, files / "broken")
    assert caught.value.__notes__ == ["jaxtrain: this is of evaluation.sets['lines']"]


def test_sets_of_another_form_are_told_with_what_to_do(
    decoder: jaxtrain.Experiment, files: Path
) -> None:
    text = jaxtrain.TextData(
        source(files / "code.txt", held_out=0.5), BpeTokenizer(300), seq=8, isolate_documents=False
    )
    sets = {
        "text": text,
        "gone": str(files / "gone.txt"),
        "chats": Conversations(str(files / "chats.jsonl")),
    }
    said = r"(?s)'text'.*isolate_documents=False.*'gone'.*gone\.txt.*'chats'.*need a chat template"
    with pytest.raises(ValueError, match=said):
        jaxtrain.check(of_sets(decoder, files, sets), "cpu_1")
    few = of_sets(decoder, files, {"code": str(files / "code.txt")})
    result, _ = train(few, files / "run", steps=1)
    (files / "code.txt").unlink()
    with pytest.raises(
        ValueError, match=r"sets\['code'\].*or evaluate without.*split=\"held_out\""
    ):
        jaxtrain.evaluate(files / "run", cache_dir=files / "cache")
    own = jaxtrain.evaluate(files / "run", split="held_out", cache_dir=files / "cache")
    assert own["eval_loss"] == result.evaluation["eval_loss"]
