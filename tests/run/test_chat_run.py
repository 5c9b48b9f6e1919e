"""A run on conversations: what it learns it answers, from the run and from the exported folder."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import turns, write_folder

import jaxtrain
from jaxtrain import AdamW, Experiment, TextData, cli
from jaxtrain.data import Conversations, DocumentStream, JsonLines, TokenizerFile
from jaxtrain.experiment.stored import stored_field
from jaxtrain.optim import Constant
from jaxtrain.run.words import _sample_text
from jaxtrain.weights import generate as weights_generate

QUESTION, ANSWER = "how are you", "I am fine"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    lines = [turns(QUESTION, ANSWER), turns("what is two plus two?", "it is four")]
    texts = "\n".join(json.dumps({"messages": messages}) for messages in lines)
    (folder / "chats.jsonl").write_text(texts, encoding="utf-8")
    tokenizer = TokenizerFile(str(write_folder(folder / "tokenizer", "gemma")), eos="</s>")
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=64))
    experiment = Experiment(
        model=jaxtrain.DecoderConfig(vocab=448, embed=32, layers=1, period=(block,), tied=True),
        data=TextData(Conversations(str(folder / "chats.jsonl"), held_out=0.0), tokenizer, seq=64),
        optimizer=AdamW(Constant(0.02)),
        steps=60,
        batch=4,
        evaluation=None,
    )
    mesh = jaxtrain.mesh_from_axes(fsdp=2, tensor=2)
    jaxtrain.train(experiment, mesh, run_dir=folder / "run", cache_dir=folder)
    return folder / "run"


def test_what_was_learnt_is_answered(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for question, answer in ((QUESTION, ANSWER), ("what is two plus two?", "it is four")):
        assert (
            cli.main(["generate", str(run), "--chat", "--prompt", question, "--temperature", "0"])
            == 0
        )
        assert capsys.readouterr().out == f"{answer}\n"
    told = jaxtrain.generate_text(run, turns(QUESTION), temperature=0.0)
    assert told == ANSWER


@pytest.mark.filterwarnings("ignore")
def test_a_sample_is_the_answer_to_a_message(run: Path, monkeypatch: Any) -> None:
    session = jaxtrain.train(load_experiment_of(run), "cpu_1", run_dir=run).session
    sample = jaxtrain.Sample(QUESTION, tokens=50, temperature=0.0, chat=True)
    assert _sample_text(session, sample) == ANSWER
    drawn = weights_generate.generate_ids
    with monkeypatch.context() as patch:  # a model that goes on behind the end of its turn
        patch.setattr(weights_generate, "generate_ids", lambda *a, **k: 2 * drawn(*a, **k))
        assert _sample_text(session, sample) == ANSWER
    plain = _sample_text(session, replace(sample, chat=False))
    assert plain.startswith(QUESTION) and plain != QUESTION + ANSWER


def load_experiment_of(run: Path) -> Experiment:
    fields = ("model", "data", "optimizer", "steps", "batch", "evaluation")
    return Experiment(**{name: stored_field(run, name) for name in fields})


@pytest.mark.parametrize("act", [jaxtrain.check, jaxtrain.train], ids=["check", "train"])
def test_an_answer_wants_a_chat_template(run: Path, act: Any) -> None:
    sample = jaxtrain.Sample("hi", tokens=2, chat=True)
    experiment = replace(load_experiment_of(run), evaluation=jaxtrain.Evaluation(sample=sample))
    texts = jaxtrain.TextFiles(str(run.parent / "*.jsonl"), separator=":", held_out=0.3)
    bytes_alone = TextData(texts, jaxtrain.data.ByteTokenizer(), seq=8)
    chain = jaxtrain.data.BigramChain(vocab=448, seq=8)
    for data, reason in ((bytes_alone, "the tokenizer has no chat template"), (chain, "no ")):
        text = rf"evaluation\.sample: chat=True: .*{reason}.*; or use chat=False"
        with pytest.raises(ValueError, match=text):
            act(replace(experiment, data=data), "cpu_1")
    with pytest.raises(ValueError, match="chat='yes' must be True or False"):
        jaxtrain.Sample("hi", chat="yes")  # type: ignore[arg-type]


def test_conversations_are_scored_as_they_are_learnt(run: Path) -> None:
    chats = [turns(QUESTION, ANSWER), turns("what is two plus two?", "it is four")]
    data = load_experiment_of(run).data
    rows = data.open("train", seed=0, cache_dir=run.parent).rows(np.arange(1))
    scored = jaxtrain.score(run, [*chats, "a text"])
    for ids, log_probs in scored[:2]:
        count, tokens = len(ids) - 1, rows["tokens"][0]
        starts = [n for n in range(64) if tokens[n : n + count].tolist() == ids[:-1]]
        assert starts, "they are in the rows that the run learns"
        place = slice(starts[0], starts[0] + count)
        assert rows["targets"][0, place].tolist() == ids[1:]
        learnt = rows["weights"][0, place] > 0
        assert learnt.any() and not learnt.all()
        assert log_probs[1:][learnt].min() > -0.5 > log_probs[1:][~learnt].min()
        ((_, again),) = jaxtrain.score(run, [ids])
        np.testing.assert_array_equal(again[1:], log_probs[1:])
    with pytest.raises(ValueError, match="text 1: no message of the assistant"):
        jaxtrain.score(run, ["a text", turns("hello")])


def test_the_exported_folder_answers_by_the_same_template(run: Path, tmp_path: Path) -> None:
    jaxtrain.export(run, tmp_path / "out")
    assert jaxtrain.generate_text(tmp_path / "out", turns(QUESTION), temperature=0.0) == ANSWER
    numbers = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    transformers: Any = pytest.importorskip(
        "transformers", reason="compares with transformers; pip install '.[parity]'"
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ends = theirs.convert_tokens_to_ids(["</s>", "<end_of_turn>"])
    assert sorted(numbers["eos_token_id"]) == sorted(ends)
    ids = theirs.apply_chat_template(turns(QUESTION), tokenize=True, return_dict=False)
    assert theirs.decode(ids).startswith("<s><start_of_turn>user\nhow are you<end_of_turn>")


def test_a_run_without_a_template_says_so(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    assert "<start_of_turn>" in settings.pop("chat_template")
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="no chat template"):
        jaxtrain.generate_text(tmp_path / "run", turns(QUESTION))


UNANSWERABLE = {
    "an empty list": ([], "messages are a list of one or more, these are an empty list"),
    "a text": (["hi"], "message 0 is a text; give an object with role and content"),
    "a conversation": ({"messages": turns("a")}, "these are an object"),
    "a number": ([{"role": "user", "content": 3}], "content of message 0 is a number"),
    "an answer last": (turns("a", "b"), "the last message is the assistant's; end with one"),
}


@pytest.mark.parametrize("case", UNANSWERABLE)
def test_what_is_no_conversation_is_not_answered(run: Path, case: str) -> None:
    messages, reason = UNANSWERABLE[case]
    with pytest.raises(ValueError, match=reason):
        jaxtrain.generate_text(run, messages)  # type: ignore


def test_a_run_from_before_prompts_were_packed_whole_goes_on_as_told(tmp_path: Path) -> None:
    """Its config lacks the field; the message names what its rows were."""
    lines = (json.dumps({"q": "how many", "text": f" {n}"}) for n in range(40))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    source = JsonLines(str(tmp_path / "pairs.jsonl"), prompt_field="q", held_out=0.0)
    block = jaxtrain.BlockConfig(jaxtrain.AttentionConfig(heads=2), jaxtrain.MlpConfig(hidden=16))

    def trained(steps: int, packing: DocumentStream | None) -> jaxtrain.Result:
        experiment = Experiment(
            model=jaxtrain.DecoderConfig(vocab=257, embed=16, layers=1, period=(block,)),
            data=TextData(source, seq=16, packing=packing),
            optimizer=AdamW(Constant(0.01)),
            steps=4,
            batch=2,
            evaluation=None,
            checkpoints=jaxtrain.SavePolicy(every=2),
        )
        mesh = jaxtrain.mesh_from_axes(data=1)
        return jaxtrain.train(
            experiment, mesh, run_dir=tmp_path / "run", cache_dir=tmp_path, steps=steps
        )

    trained(2, DocumentStream())
    older = tmp_path / "run" / "config.json"
    config = json.loads(older.read_text())
    del config["experiment"]["data"]["packing"]
    older.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"another corpus.*packing=DocumentStream\(\)"):
        trained(4, None)
    assert trained(4, DocumentStream()).steps == 4
