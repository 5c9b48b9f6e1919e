"""Tokenizers with chat templates in the formats of published families, and conversations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from jaxtrain.tokenizers import HuggingFaceVocabulary
from jaxtrain.tokenizers.chat import ChatTemplate

WORDS = ["hello how are you, I am fine; what is two plus two? it is four", "def f(x): return <b>"]

# As the family writes it, with what the assistant generates between {g} and {e}.
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['role'] == 'assistant' %}{g}{{ m['content'] | trim + '<|eot_id|>' }}{e}"
    "{% else %}{{ m['content'] | trim + '<|eot_id|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN_2 = (
    "{%- if messages[0].role != 'system' %}"
    "{{- '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{%- endif %}"
    "{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{%- for tool in tools %}"
    "{{- '\n' + (tool | tojson) }}{%- endfor %}{{- '\n</tools><|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{g}{{- m.content or '' }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>' }}{e}{{- '\n' }}"
    "{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
# Qwen 3 leaves out the reasoning of all but the last turn.
QWEN_3 = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' %}{%- set text = m.content %}{%- set thought = '' %}"
    "{%- if '</think>' in text %}"
    "{%- set thought = text.split('</think>')[0].split('<think>')[-1] %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{g}{%- if loop.last %}"
    "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + text.lstrip('\n') }}"
    "{%- else %}{{- text }}{%- endif %}{{- '<|im_end|>' }}{e}{{- '\n' }}"
    "{%- else %}{{- m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ ' [INST] ' + m['content'] + ' [/INST]' }}{% elif m['role'] == 'assistant' %}"
    "{g}{{ ' ' + m['content'] + eos_token }}{e}"
    "{% else %}{{ raise_exception('roles are user and assistant') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = m['role'] %}"
    "{% if role == 'assistant' %}{{ '<start_of_turn>model\n' }}"
    "{g}{{ m['content'] | trim + '<end_of_turn>' }}{e}{{ '\n' }}"
    "{% else %}{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
BY_HAND = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A: ' }}{g}{{ m.content + '\n' }}{e}"
    "{% else %}{{ 'Q: ' + m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)
TEMPLATES = {
    "llama 3": LLAMA_3,
    "qwen 2.5": QWEN_2,
    "qwen 3": QWEN_3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "by hand": BY_HAND,
}
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<start_of_turn>", "<end_of_turn>"),
)
ENDS = {"llama 3": "<|eot_id|>", "gemma": "<end_of_turn>", "mistral": "</s>", "by hand": "</s>"}


def source_of(name: str, *, generation: bool) -> str:
    """A family's template, with generation blocks or without."""
    g, e = ("{% generation %}", "{% endgeneration %}") if generation else ("", "")
    return TEMPLATES[name].replace("{g}", g).replace("{e}", e)


def tokenizer(kind: str) -> str:
    """A tokenizer.json: `bytes` as Llama 3 and Qwen have it, `words` as SentencePiece."""
    trainer: dict[str, Any] = {"vocab_size": 420, "show_progress": False}
    built = Tokenizer(models.BPE(byte_fallback=kind == "words", unk_token=None))
    if kind == "bytes":
        built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        built.decoder = decoders.ByteLevel()
        trainer["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    else:
        built.normalizer = normalizers.NFC()
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        built.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer["initial_alphabet"] = [chr(c) for c in range(32, 127)] + ["\n"]
    built.train_from_iterator(WORDS * 3, trainers.BpeTrainer(**trainer))
    built.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    built.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>", "<tool_call>")])
    return built.to_str()


def template(name: str, *, generation: bool = False) -> ChatTemplate:
    tokens = (("bos_token", "<s>"), ("eos_token", ENDS.get(name, "<|im_end|>")))
    return ChatTemplate(source_of(name, generation=generation), tokens)


def vocabulary(
    name: str, kind: str = "bytes", *, generation: bool = False
) -> HuggingFaceVocabulary:
    chat = template(name, generation=generation)
    return HuggingFaceVocabulary(tokenizer(kind), eos=dict(chat.tokens)["eos_token"], chat=chat)


def write_folder(folder: Path, name: str, kind: str = "bytes", *, generation: bool = False) -> Path:
    """Writes a tokenizer with its template as `transformers` reads it."""
    chat = template(name, generation=generation)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer(kind), encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **dict(chat.tokens)}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(chat.source, encoding="utf-8")
    return folder / "tokenizer.json"


def turns(*texts: str, system: str | None = None) -> list[dict[str, Any]]:
    """A conversation: the user begins, and the assistant answers."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


CONVERSATIONS = {
    "one answer": turns("hello", "I am fine"),
    "three answers": turns("hello", "fine", "what is  two plus two?", "it is four\n", "x", " y "),
    "reasoning": turns("a", "<think>\nwhy\n</think>\n\nso", "b", "<think>\nhm\n</think>\n\nthus"),
    "a question last": turns("hello", "how are you", "fine"),
}
