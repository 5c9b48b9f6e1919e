"""A run on conversations: what it learns it answers, from the run and from the exported folder."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from chats import turns, write_folder

import jaxtrain
from jaxtrain import AdamW, Experiment, TextData, cli
from jaxtrain.data import Conversations, DocumentStream, JsonLines, Mixture, TokenizerFile
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
    absent = "chat=True: the tokenizer has no chat template.*; or use chat=False"
    for data, reason in (
        (bytes_alone, absent),
        (chain, "a bigram chain has no text; use TextData"),
    ):
        with pytest.raises(ValueError, match=rf"evaluation\.sample: {reason}"):
            act(replace(experiment, data=data), "cpu_1")
    with pytest.raises(ValueError, match="chat='yes' must be True or False"):
        jaxtrain.Sample("hi", chat="yes")  # type: ignore[arg-type]


SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('a system message comes first') }}"
    "{% endif %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<end_of_turn>' }}{% endgeneration %}{% else %}{{ m.content + ':' }}{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def system_first(run: Path) -> Experiment:
    """Of a template that refuses a conversation without a system message."""
    experiment = load_experiment_of(run)
    folder = run.parent
    (folder / "first.jinja").write_text(SYSTEM_FIRST)
    system = {"role": "system", "content": "be short"}
    texts = (json.dumps({"messages": [system, *turns(QUESTION, ANSWER)]}) for _ in range(4))
    (folder / "systems.jsonl").write_text("\n".join(texts))
    data: Any = experiment.data
    template = str(folder / "first.jinja")
    tokenizer = replace(data.tokenizer, chat_template=template)
    source = Conversations(str(folder / "systems.jsonl"), held_out=0.0)
    return replace(experiment, data=replace(data, source=source, tokenizer=tokenizer), steps=2)


@pytest.mark.parametrize("act", [jaxtrain.check, jaxtrain.train], ids=["check", "train"])
def test_a_sample_that_the_template_or_the_positions_refuse(
    system_first: Experiment, act: Any, tmp_path: Path
) -> None:
    sample = jaxtrain.Sample("hi", tokens=60, chat=True)
    sampled = jaxtrain.Evaluation(sample=sample)
    with pytest.raises(ValueError, match=r"sample: chat=True: .*a system message comes"):
        act(replace(system_first, evaluation=sampled), "cpu_1")
    (tmp_path / "asks.jsonl").write_text("hi:there:again:and again")
    (tmp_path / "asks.jinja").write_text(
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('it only asks') }}{% endif %}"
    )
    tokenizer = replace(system_first.data.tokenizer, chat_template=str(tmp_path / "asks.jinja"))
    texts = jaxtrain.TextFiles(str(tmp_path / "asks.jsonl"), separator=":", held_out=0.3)
    asks = replace(system_first, data=TextData(texts, tokenizer, seq=64), evaluation=sampled)
    with pytest.raises(ValueError, match=r"sample: chat=True: .*it only asks"):
        act(asks, "cpu_1")
    with pytest.raises(ValueError, match="half a surrogate"):
        jaxtrain.Sample("a\ud800")
    small = replace(system_first.model, learned_positions=64)
    data: Any = replace(
        system_first.data, tokenizer=replace(system_first.data.tokenizer, chat_template=None)
    )
    for chat, prompt in ((False, "hi you there"), (True, "hi")):  # the template adds to it
        evaluation = jaxtrain.Evaluation(sample=replace(sample, prompt=prompt, chat=chat))
        long = replace(system_first, model=small, data=data, evaluation=evaluation)
        with pytest.raises(ValueError, match=r"a prompt of \d+ tokens and tokens=60 pass"):
            act(long, "cpu_1")


@pytest.mark.filterwarnings("ignore")
def test_an_answer_to_a_system_message_ends_where_its_turn_does(system_first: Experiment) -> None:
    session = jaxtrain.train(system_first, "cpu_1").session
    system = {"role": "system", "content": "be short"}
    drawn = dict(tokens=3, temperature=0.0)
    told = jaxtrain.weights.generate.generate(session, [system, *turns("hi")], **drawn)
    alike = (MappingProxyType(system), *turns("hi"))
    assert told == jaxtrain.weights.generate.generate(session, alike, **drawn)
    with pytest.raises(ValueError, match="a system message comes first"):
        jaxtrain.weights.generate.generate(session, turns("hi"), **drawn)


@pytest.mark.filterwarnings("ignore")
def test_a_run_on_a_mixture_ends_with_its_answer(run: Path) -> None:
    """The same for the same seed of the experiment."""
    experiment = load_experiment_of(run)
    data: Any = experiment.data
    held_out = shutil.copy(str(data.source.patterns), run.parent / "held_out.chats")
    source = replace(data.source, held_out_patterns=str(held_out))
    mixed = replace(data, source=Mixture(((1, source), (1, source))))
    sampled = jaxtrain.Evaluation(sample=jaxtrain.Sample("hi", tokens=8, chat=True))

    def answered(seed: int) -> str:
        stream = io.StringIO()
        short = replace(experiment, data=mixed, steps=1, evaluation=sampled, seed=seed)
        result = jaxtrain.train(short, "cpu_1", stream=stream)
        told = stream.getvalue()
        assert "--- 8 tokens at temperature 0.8, the answer to 'hi'\n" in told
        assert result.sample and f" {result.sample}\n" in told
        drawn = dict(tokens=8, temperature=0.8, seed=seed)
        generate = jaxtrain.weights.generate.generate
        assert result.sample == generate(result.session, turns("hi"), **drawn)
        return str(result.sample)

    assert answered(1) != answered(2)


class Words:
    """A tokenizer class of one's own, which reads its corpus."""

    def build(self, texts: Any, *, corpus: str, cache_dir: Path) -> Any:
        raise AssertionError("it is built of no text")


def test_a_check_does_not_build_a_tokenizer_of_ones_own(run: Path) -> None:
    sampled = jaxtrain.Evaluation(sample=jaxtrain.Sample("hi", tokens=2, chat=True))
    texts = jaxtrain.TextFiles(str(run.parent / "*.jsonl"), separator=":", held_out=0.3)
    data = TextData(texts, Words(), seq=8)  # type: ignore[arg-type]
    jaxtrain.check(replace(load_experiment_of(run), data=data, evaluation=sampled), "cpu_1")


def test_a_prompt_counts_with_bos_and_a_broken_tokenizer_is_told(run: Path, tmp_path: Path) -> None:
    experiment = load_experiment_of(run)
    data: Any = experiment.data
    texts = jaxtrain.TextFiles(str(run.parent / "*.jsonl"), separator=":", held_out=0.3)
    begun = replace(data, source=texts, tokenizer=replace(data.tokenizer, add_bos=True))
    vocabulary = begun.tokenizer.build(lambda: iter(()), corpus="", cache_dir=tmp_path)
    length = 1 + len(vocabulary.encode("hi"))
    small: Any = replace(experiment.model, learned_positions=64)
    for to in (64 - length, 65 - length):
        sample = jaxtrain.Evaluation(sample=jaxtrain.Sample("hi", tokens=to))
        checked = replace(experiment, data=begun, model=small, evaluation=sample)
        if to + length == 64:
            jaxtrain.check(checked, "cpu_1")
        else:
            with pytest.raises(ValueError, match=f"a prompt of {length} tokens and tokens={to}"):
                jaxtrain.check(checked, "cpu_1")
    bytes_alone = replace(begun, tokenizer=jaxtrain.data.ByteTokenizer(), seq=8)
    longer = jaxtrain.Evaluation(sample=jaxtrain.Sample("hi", tokens=63))
    with pytest.raises(ValueError, match=r"^1 thing to mend .*\n.* a prompt of at least 2 tokens"):
        jaxtrain.check(replace(checked, data=bytes_alone, evaluation=longer), "cpu_1")
    (tmp_path / "tokenizer.json").write_text("{ no")
    broken = replace(begun, tokenizer=TokenizerFile(str(tmp_path), eos="</s>"))
    with pytest.raises(ValueError, match=r"- data: .* cannot be used as a tokenizer"):
        jaxtrain.check(replace(checked, data=broken), "cpu_1")


class Spelled:
    """Rows of one's own, whose encode knows two letters."""

    seq, isolate_documents, vocab, digest = 8, False, 448, "spelled"

    def open(self, split: str, *, seed: int, cache_dir: Path) -> Spelled:
        return self

    def __len__(self) -> int:
        return 8

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        tokens = np.ones((len(indices), 8), np.int32)
        return {"tokens": tokens, "targets": tokens, "weights": tokens.astype(np.float32)}

    def encode(self, text: str) -> list[int]:
        return [{"a": 1, "b": 2}[letter] for letter in text.strip()]

    def decode(self, ids: Any) -> str:
        return "".join("-ab"[i] for i in ids)


def test_what_an_encode_of_ones_own_raises_is_told_before_the_first_step(run: Path) -> None:
    reasons = {"abc": "is not encoded: KeyError: 'c'; give another", " ": "becomes no tokens"}
    for prompt, reason in reasons.items():
        sampled = jaxtrain.Evaluation(sample=jaxtrain.Sample(prompt, tokens=2))
        experiment = replace(load_experiment_of(run), data=Spelled(), evaluation=sampled)
        with pytest.raises(ValueError, match=rf"evaluation\.sample: its prompt {reason}"):
            jaxtrain.train(experiment, "cpu_1")


def test_messages_are_any_sequence_of_mappings(run: Path) -> None:
    chat = turns(QUESTION, ANSWER)
    alike = [chat, tuple(chat), [MappingProxyType(m) for m in chat]]
    first, *others = jaxtrain.score(run, alike)
    for scored in others:
        np.testing.assert_array_equal(scored.log_probs, first.log_probs)
    with pytest.raises(ValueError, match=r"one conversation; give a list of them: \[messages\]"):
        jaxtrain.score(run, chat)
    with pytest.raises(ValueError, match="messages are a list of one or more, these are a bytes"):
        jaxtrain.generate_text(run, b"hi")  # type: ignore[arg-type]


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
