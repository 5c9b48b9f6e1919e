"""Conversations: the ids and the mask that `transformers` makes of them, and nothing a template or
a message could do beside."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chats import CONVERSATIONS, SPECIAL, TEMPLATES, turns, vocabulary, write_folder
from tokenizers import Tokenizer, processors

from jaxtrain.data import ByteTokenizer, TokenizerFile
from jaxtrain.tokenizers import HuggingFaceVocabulary
from jaxtrain.tokenizers import chat as chat_module
from jaxtrain.tokenizers.chat import ChatEncoder, ChatTemplate, Conversation, folder_template

KINDS = ("bytes", "words")


def pieces(vocabulary: HuggingFaceVocabulary, ids: Any) -> list[str]:
    return [vocabulary.token(int(i)) for i in ids]


def built(folder: Path) -> HuggingFaceVocabulary:
    return TokenizerFile(str(folder)).build(lambda: iter(()), corpus="", cache_dir=folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", TEMPLATES)
def test_ids_and_mask_are_those_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    """From the same folder: with generation blocks as it reads them, and without as with."""
    why = "compares with transformers; pip install '.[parity]'"
    transformers: Any = pytest.importorskip("transformers", reason=why)
    path = write_folder(tmp_path / "with", family, kind, generation=True)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent)
    with ChatEncoder(built(path)) as blocks, ChatEncoder(vocabulary(family, kind)) as bare:
        for name, messages in CONVERSATIONS.items():
            expected = theirs.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            ids, learnt = blocks.encode(Conversation(messages))
            if family == "by hand" and messages[-1]["role"] == "assistant":  # eos ends the turn
                assert ids[-1] == blocks.vocabulary.eos and learnt[-1]
                ids, learnt = ids[:-1], learnt[:-1]
            assert ids.tolist() == expected["input_ids"], name
            mask = np.array(expected["assistant_masks"], dtype=bool)
            assert learnt.tolist() == mask.tolist() and mask.any(), name
            alone = bare.encode(Conversation(messages))
            assert alone.ids[: len(ids)].tolist() == ids.tolist(), name
            assert alone.learnt[: len(ids)].tolist() == mask.tolist(), name
            prompt = theirs.apply_chat_template(
                messages[:1], tokenize=True, return_dict=False, add_generation_prompt=True
            )
            assert bare.prompt(Conversation(messages[:1])) == prompt


@pytest.mark.filterwarnings("ignore")
def test_tools_and_calls_are_those_of_transformers(tmp_path: Path) -> None:
    why = "compares with transformers; pip install '.[parity]'"
    transformers: Any = pytest.importorskip("transformers", reason=why)
    path = write_folder(tmp_path, "qwen 2.5", generation=True)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    call = {"function": {"name": "sum", "arguments": {"a": "\u00e9", "b": None}}}
    messages = [
        *turns("two plus two?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "it is four"},
    ]
    tools = [{"type": "function", "function": {"name": "sum", "description": "adds"}}]
    expected = theirs.apply_chat_template(
        messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for encoder in (built(path), vocabulary("qwen 2.5")):
        with ChatEncoder(encoder) as chat:
            messages_of = [{k: v for k, v in m.items() if v is not None} for m in messages]
            ids, learnt = chat.encode(Conversation(messages_of, tools))
        assert ids.tolist() == expected["input_ids"]
        assert learnt.astype(int).tolist() == expected["assistant_masks"]


@pytest.mark.parametrize("family", TEMPLATES)
def test_what_is_learnt_is_the_answer_and_its_end(family: str) -> None:
    vocab = vocabulary(family)
    messages = turns("hello", "I am fine", "x", "it is four")
    with ChatEncoder(vocab) as chat:
        both = chat.encode(Conversation(messages))
        last = chat.encode(Conversation(messages, learn="last"))
        end = chat.end_of_turn()
    assert both.ids.tolist() == last.ids.tolist()
    texts = ["".join(pieces(vocab, r.ids[r.learnt])).replace("\u0120", " ") for r in (both, last)]
    plain = [t.replace("<think>\u010a\u010a</think>\u010a\u010a", "").strip() for t in texts]
    stop = "" if end is None else vocab.token(end)
    plain = [text.replace("\u010a", "") for text in plain]
    assert plain[1] == f"it is four{stop or vocab.eos_token}"
    assert plain[0].replace(" ", "") == f"Iamfine{stop}{plain[1]}".replace(" ", "")


WHERE = {
    "content": lambda text: turns(text, text),
    "parts of a content": lambda text: [
        *turns("q"),
        {"role": "assistant", "content": "a", "parts": [{"text": text}]},
    ],
    "a role": lambda text: [{"role": f"user{text}", "content": "q"}, *turns("q", "a")[1:]],
    "a value named role": lambda text: _called({"role": text}),
    "a name": lambda text: _called({text: "x"}),
}


def _called(arguments: dict[str, str]) -> list[dict[str, Any]]:
    call = {"function": {"name": "f", "arguments": arguments}}
    return [*turns("q"), {"role": "assistant", "content": "a", "tool_calls": [call]}]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen 2.5", "gemma", "llama 3"])
def test_nothing_of_a_message_becomes_a_special_token(family: str, kind: str, where: str) -> None:
    """Special tokens are those of the same conversation with a plain text, which is kept to the
    letter; also where one lies in another, and where the template's text follows at once."""
    vocab = vocabulary(family, kind)
    spelled = " ".join(("a", *SPECIAL, "<|im_<|im_start|>start|>", "\ufdd0", "<|im_"))
    with ChatEncoder(vocab) as chat:
        results = [chat.encode(Conversation(WHERE[where](text))) for text in ("b", spelled)]
    special = [[i for i in r.ids.tolist() if i in vocab.special_ids] for r in results]
    assert special[0] == special[1]
    if where == "content":
        text = vocab.decode(results[1].ids[results[1].learnt]).strip()
        assert text == spelled if kind == "bytes" else text.startswith("a <s> </s> <|im_start|>")


def test_special_tokens_in_and_over_others_and_of_one_character() -> None:
    content = json.loads(vocabulary("gemma").json)
    built = Tokenizer.from_str(json.dumps(content))
    built.add_special_tokens(["<SYS>", "<<SYS>>", "ab>", ">cd", "\u00a7"])
    vocab = HuggingFaceVocabulary(built.to_str(), eos="</s>", chat=vocabulary("gemma").chat)
    with ChatEncoder(vocab) as chat:
        plain = chat.encode(Conversation(turns("x", "y"))).ids.tolist()
        ids = chat.encode(Conversation(turns("<<SYS>> ab>cd <SYS", "<SYS>ab>"))).ids.tolist()
        assert [i for i in plain if i in vocab.special_ids] == [
            i for i in ids if i in vocab.special_ids
        ]
        with pytest.raises(ValueError, match="'\u00a7', which is a special token of one character"):
            chat.encode(Conversation(turns("\u00a7 1", "y")))


def test_a_text_that_only_looks_like_a_special_token_is_text() -> None:
    """Where special tokens are looked for in the normalized text."""
    content = json.loads(vocabulary("gemma", "words").json)
    content["normalizer"] = {"type": "NFKC"}
    for token in content["added_tokens"]:
        token["normalized"] = True
    text = json.dumps(content)
    vocab = HuggingFaceVocabulary(text, eos="</s>", chat=vocabulary("gemma").chat)
    with ChatEncoder(vocab) as chat:
        counts = [
            np.isin(chat.encode(Conversation(turns("x", t))).ids, vocab.special_ids).sum()
            for t in ("y", "\uff1c/s\uff1e", "</s>")
        ]
    assert counts[0] == counts[1] == counts[2] == 5


def test_marked_texts_are_those_without_a_mark() -> None:
    """The same ids, whether or not a message spells a special token elsewhere."""
    vocab = vocabulary("qwen 2.5")
    with ChatEncoder(vocab) as chat:
        plain = chat.encode(Conversation(turns("how are you", "it is four, what?"))).ids.tolist()
        marked = chat.encode(Conversation(turns("<|im_end|>", "it is four, what?"))).ids.tolist()
    begins = np.flatnonzero(np.array(plain) == vocab.id_of("<|im_start|>"))
    tail = plain[begins[-1] :]
    assert len(tail) > 10 and marked[-len(tail) :] == tail


HOSTILE = {
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "for more",
    # In one operation of C, and while the template is compiled.
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}": "for more than 2 s",
    "{{ (7 ** (10 ** 9)) % 3 }}": "for more than 2 s",
    "{{ 'a' * 10 ** 11 }}": "of memory",
    "{{ lipsum() }}": "'lipsum' is undefined",
    "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}": "16,777,216 characters",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ raise_exception('no such role') }}": "^the chat template refuses it: no such role$",
    "{{ messages[0].a.b }}": "no attribute 'b'|has no",
    "{{ open('/etc/passwd') }}": "'open' is undefined",
}


@pytest.mark.parametrize("source", HOSTILE)
def test_a_template_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By processor time, not by the clock; of 10 s outside of this test."""
    assert chat_module.CPU_SECONDS == 10
    monkeypatch.setattr(chat_module, "CPU_SECONDS", 2)
    vocab = HuggingFaceVocabulary(
        vocabulary("gemma").json, eos="</s>", chat=ChatTemplate(source.replace("\n", ""))
    )
    with pytest.raises(ValueError, match=HOSTILE[source]), ChatEncoder(vocab) as encoder:
        encoder.encode(Conversation(turns("a", "b")))


def test_a_conversation_after_a_refused_one_is_rendered() -> None:
    with ChatEncoder(vocabulary("mistral")) as chat:
        with pytest.raises(ValueError, match="roles are user and assistant"):
            chat.encode(Conversation(turns("a", "b", system="s")))
        assert chat.encode(Conversation(turns("a", "b"))).learnt.any()


def test_a_bad_template_and_none_are_named() -> None:
    chat = ChatTemplate("\n{% if %}", path="own.jinja")
    bad = HuggingFaceVocabulary(vocabulary("gemma").json, eos="</s>", chat=chat)
    with pytest.raises(ValueError, match=r"template own\.jinja cannot be used: line 2:"):
        ChatEncoder(bad)
    with pytest.raises(ValueError, match=r"no chat template.*chat_template\.jinja beside"):
        ChatEncoder(ByteTokenizer())


def test_a_template_that_hides_its_turns_is_refused() -> None:
    """Neither special tokens around an answer, nor messages in order."""
    chat = ChatTemplate(
        "{% for m in messages | reverse %}{{ m.role + ': ' + m.content }}{% endfor %}"
    )
    vocab = HuggingFaceVocabulary(vocabulary("gemma").json, eos="</s>", chat=chat)
    with ChatEncoder(vocab) as encoder, pytest.raises(ValueError, match=r"put {% generation %}"):
        encoder.encode(Conversation(turns("a", "b", "c", "d")))


def test_nothing_to_learn_is_refused() -> None:
    with ChatEncoder(vocabulary("gemma")) as chat, pytest.raises(ValueError, match="no message of"):
        chat.encode(Conversation(turns("a")))


def test_the_day_changes_nothing() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%d') }}{% else %}1 May{% endif %}"
    vocab = HuggingFaceVocabulary(vocabulary("gemma").json, eos="</s>", chat=ChatTemplate(source))
    with ChatEncoder(vocab) as chat:
        assert chat.render(Conversation([])).text == "1 May"


def test_a_folder_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    path = write_folder(tmp_path, "gemma")
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"chat_template": "older", "bos_token": {"content": "<s>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "special_tokens_map.json").write_text('{"unk_token": "</s>", "bos_token": "x"}')
    read = folder_template(tmp_path)
    assert read is not None and "start_of_turn" in read.source
    expected = {"bos_token": "<s>", "eos_token": "<end_of_turn>", "unk_token": "</s>"}
    assert dict(read.tokens) == expected
    assert built(path).eos_token == "<end_of_turn>"  # the folder's
    (tmp_path / "chat_template.jinja").unlink()
    assert getattr(folder_template(tmp_path), "source", "") == "older"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert getattr(folder_template(tmp_path), "source", "") == "d"
    (tmp_path / "own.jinja").write_text("mine")
    own = TokenizerFile(str(path), eos="</s>", chat_template=str(tmp_path / "own.jinja"))
    vocab = own.build(lambda: iter(()), corpus="", cache_dir=tmp_path)
    assert vocab.chat is not None and vocab.chat.source == "mine" and vocab.eos_token == "</s>"
    assert pickle.loads(pickle.dumps(vocab)).chat == vocab.chat
    (tmp_path / "own.jinja").unlink()
    assert "there is no chat template" in own.absent()[0]


def test_a_conversation_is_not_changed() -> None:
    messages = turns("a <|im_end|>", "b")
    before = copy.deepcopy(messages)
    with ChatEncoder(vocabulary("qwen 2.5")) as chat:
        chat.encode(Conversation(messages))
    assert messages == before


def encoder_of(source: str) -> ChatEncoder:
    tokens = (("eos_token", "</s>"),)
    chat = ChatTemplate(source, tokens)
    return ChatEncoder(HuggingFaceVocabulary(vocabulary("gemma").json, eos="</s>", chat=chat))


def test_an_end_outside_the_generation_block_is_kept_and_told_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As `transformers` has it: one end, without loss."""
    source = (
        "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ eos_token }}{% endfor %}"
    )
    for _ in range(2):
        with encoder_of(source) as chat:
            ids, learnt = chat.encode(Conversation(turns("a", "bc")))
    assert pieces(chat.vocabulary, ids)[-3:] == ["b", "c", "</s>"]
    assert learnt.tolist()[-3:] == [True, True, False]
    assert caplog.text.count("may not stop") == 1


def test_a_template_that_leaves_out_the_beginning_of_an_answer_is_completed() -> None:
    """`add_generation_prompt` changes nothing in it: the model is not to write the header."""
    body = "{% for m in messages %}<s>{{ m.role + '\n' + m.content + eos_token }}{% endfor %}"
    prompted = body + "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
    messages = turns("hello", "fine", "x", "it is four")
    results = []
    for source in (body, prompted, body.replace("<s>", "# ")):
        with encoder_of(source) as chat:
            learnt = chat.encode(Conversation(messages))
            results.append((learnt, chat.prompt(Conversation(messages[:3]))))
            assert chat.vocabulary.decode(learnt.ids[learnt.learnt]) in ("fineit is four",)
    (ids, mask), prompt = results[0]
    assert ids.tolist() == results[1][0].ids.tolist() and prompt == results[1][1]
    assert ids.tolist()[: len(prompt)] == prompt and mask[len(prompt)]
    plain = chat.vocabulary.decode(results[2][1])
    assert plain.endswith("# assistant\n")


BLIND = {
    "": "writes nothing that the assistant says",
    "hello": "writes nothing that the assistant says",
    "{% for m in messages %}{% generation %}{% endgeneration %}a{% endfor %}": "blocks have no",
    "{{ strftime_now('%Y') }}{{ messages[1].content }}": "fails.*strftime_now is defined",
}


@pytest.mark.parametrize("source", BLIND)
def test_templates_that_write_no_answer_are_refused(source: str) -> None:
    with encoder_of(source) as chat, pytest.raises(ValueError, match=BLIND[source]):
        chat.encode(Conversation(turns("a", "b")))


def test_a_tool_call_with_an_end_of_its_own_is_no_part_of_the_next_turn() -> None:
    """Not what the tool says either."""
    source = (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>{{ m.content }}"
        "{% if m.tool_calls %}<s>{% else %}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>{% endif %}"
    )
    messages = [
        *turns("q"),
        {"role": "assistant", "content": "call", "tool_calls": [{}]},
        {"role": "tool", "content": "TOOL"},
        {"role": "assistant", "content": "so"},
    ]
    with encoder_of(source) as chat:
        ids, learnt = chat.encode(Conversation(messages))
        assert "".join(pieces(chat.vocabulary, ids[learnt])) == "call<s>so<|eot_id|>"


def test_nothing_is_added_where_a_question_is_last() -> None:
    with ChatEncoder(vocabulary("by hand")) as chat:
        ids, learnt = chat.encode(Conversation(turns("hello", "fine", "b")))
        ended = chat.encode(Conversation(turns("hello", "fine")))
        assert chat.end_of_turn() is None
    assert ids[-1] != chat.vocabulary.eos and not learnt[-1]
    assert ended.ids[-1] == chat.vocabulary.eos and ended.learnt[-2:].all()


def test_the_last_of_several_blocks_in_a_message_is_not_guessed() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.thinking }}{% endgeneration %}|"
        "{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% endfor %}"
    )
    with encoder_of(source) as chat:
        assert chat.encode(Conversation(turns("a", "b"))).learnt.any()
        with pytest.raises(ValueError, match="writes 4 generation blocks for 1 messages"):
            chat.encode(Conversation(turns("a", "b"), learn="last"))


def test_a_process_that_ends_is_named_and_an_interrupted_one_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversation = Conversation(turns("a", "b"))
    with ChatEncoder(vocabulary("gemma")) as chat:
        chat._process.kill()
        chat._process.wait()
        with pytest.raises(ValueError, match="process of the chat template has ended"):
            chat.render(conversation)
    with ChatEncoder(vocabulary("gemma")) as chat:
        stdout = chat._process.stdout

        class Interrupted:
            def readline(self) -> str:
                raise KeyboardInterrupt

            def close(self) -> None:
                assert stdout is not None
                stdout.close()

        chat._process.stdout = Interrupted()  # type: ignore
        with pytest.raises(KeyboardInterrupt):
            chat.render(conversation)
        assert chat._process.returncode is not None
        chat._process.stdout = stdout


def test_the_template_runs_in_this_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in another of its name, nor beside a module of the user's that is named as one of its."""
    (tmp_path / "jaxtrain").mkdir()
    (tmp_path / "jaxtrain" / "__init__.py").write_text("raise SystemExit(3)")
    (tmp_path / "jinja2.py").write_text("raise SystemExit(4)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [p for p in sys.path if p] + [""])
    with ChatEncoder(vocabulary("gemma")) as chat:
        assert chat.render(Conversation(turns("a", "b"))).turns


def test_a_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    path = write_folder(tmp_path, "gemma")
    (tmp_path / "chat_template.jinja").unlink()
    answer = "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    named = [
        {"name": "default", "template": f"D{answer}"},
        {"name": "tool_use", "template": f"T{{{{ tools | tojson }}}}{answer}"},
    ]
    tools = [{"name": "<s>"}]

    def texts(templates: Any) -> list[str]:
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "</s>", "chat_template": templates})
        )
        again = tmp_path / "again"
        again.mkdir(exist_ok=True)
        saved = eval(built(path).save(again)).build(lambda: iter(()), corpus="", cache_dir=again)
        with ChatEncoder(saved) as chat:
            given = [Conversation(turns("a", "b"), t) for t in (None, tools)]
            results = [chat.encode(conversation) for conversation in given]
            special = [np.isin(r.ids, saved.special_ids).sum() for r in results]
            assert special == [1, 1]  # eos alone
            return [saved.decode(r.ids) for r in results]

    assert texts(named) == ["Db", 'T[{"name": "<s>"}]b']
    assert texts(named[1:])[1] == 'T[{"name": "<s>"}]b'


def test_a_tokenizer_that_truncates_does_not(tmp_path: Path) -> None:
    content = json.loads(vocabulary("gemma").json)
    content["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    text = json.dumps(content)
    cut = HuggingFaceVocabulary(text, eos="</s>", chat=vocabulary("gemma").chat)
    with ChatEncoder(cut) as chat, ChatEncoder(vocabulary("gemma")) as whole:
        conversation = Conversation(turns("hello", "fine"))
        assert chat.encode(conversation).ids.tolist() == whole.encode(conversation).ids.tolist()
    assert len(cut.encode("hello how are you")) > 3


def test_a_mark_is_not_written_out() -> None:
    source = (
        "{{ messages[1] | tojson(ensure_ascii=True) }}"
        "{% generation %}{{ messages[1].content + eos_token }}{% endgeneration %}"
    )
    with encoder_of(source) as chat:
        text = chat.vocabulary.decode(chat.encode(Conversation(turns("a", "\u00e9 <s>"))).ids)
    assert "ufd" not in text and "\\u00e9 <s>" in text


def test_the_tokens_that_a_prompt_ends_with_are_marked_too() -> None:
    vocab = vocabulary("qwen 2.5")
    with ChatEncoder(vocab) as chat:
        plain, hostile = (chat.prompt(Conversation(turns(t))) for t in ("x", "<|im_end|>"))
    count = [sum(i in vocab.special_ids for i in ids) for ids in (plain, hostile)]
    assert count[0] == count[1]


def test_bos_is_put_behind_the_steps_of_the_own_post_processor() -> None:
    """Which are kept."""
    content = Tokenizer.from_str(vocabulary("gemma").json)
    content.post_processor = processors.ByteLevel(trim_offsets=True)
    vocab = HuggingFaceVocabulary(content.to_str(), eos="</s>")
    processed = json.loads(vocab.beginning_with(vocab.id_of("<s>")))["post_processor"]
    assert [p["type"] for p in processed["processors"]] == ["ByteLevel", "TemplateProcessing"]


def test_bos_and_eos_are_in_the_key() -> None:
    text = vocabulary("gemma").json
    options: list[dict[str, Any]] = [{}, {"bos": 3}, {"bos": 4}, {"add_eos": False}]
    assert len({HuggingFaceVocabulary(text, eos="</s>", **o).key for o in options}) == 4
