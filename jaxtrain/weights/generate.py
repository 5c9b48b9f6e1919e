"""A continuation sampled from the model being trained, with a key-value cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.experiment.evaluation import length_violations, temperature_violations
from jaxtrain.experiment.fields import seed_violations
from jaxtrain.experiment.reading import Trust
from jaxtrain.models.layered import ModelConfig
from jaxtrain.nn.local import Local
from jaxtrain.nn.module import put_together
from jaxtrain.nn.param import named_key
from jaxtrain.optim.precision import Precision
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import params_in_natural_order
from jaxtrain.step.state import TrainState, averaged_params
from jaxtrain.tokenizers.assistant_turns import Messages
from jaxtrain.tokenizers.chat import ChatEncoder, Conversation, checked_messages
from jaxtrain.validation.own_attention import SAMPLES, is_standard, kernel_name
from jaxtrain.violations import count, raise_violations
from jaxtrain.weights.loading import load, static_of
from jaxtrain.weights.tokenizer_files import KeptTokenizer, vocabulary_of


class Sampled(Protocol):
    """A model that can continue texts: `train(...).session`, or anything with these attributes."""

    assembly: Assembly
    state: TrainState
    dataset: Any


def generate(
    session: Sampled,
    prompt: str | Messages,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Returns the continuation of `prompt` by the model of a run, `train(...).session`, with its
    averaged weights where it keeps them. prompt: a text, or messages, of which it gives the
    answer. temperature, top_k: as for `generate_ids`. Raises ValueError as that does, for a model
    of the user's own, and for messages without a chat template."""
    described = session.assembly.description
    if described is None or "generation" not in described.can:
        raise ValueError(
            "generate continues texts with a model that describes itself and generates, and this "
            "run has another; sample from it by its own methods, with the parameters of "
            "session.state"
        )
    raise_violations(sampling_violations(tokens, temperature, seed, top_k))
    kernel = session.assembly.experiment.execution.attention
    if not is_standard(kernel):
        raise ValueError(
            f"generate {SAMPLES}, and this run was trained with execution.attention="
            f"{kernel_name(kernel)}, a kernel of your own; where it computes the same, say so "
            f"({kernel_name(kernel)}.standard = True)"
        )
    is_text, ends = isinstance(prompt, str), frozenset[int]()
    if isinstance(prompt, str):
        prompt_ids = session.dataset.encode(prompt)
    else:
        vocabulary = chat_vocabulary(session.dataset)
        kept = KeptTokenizer(vocabulary, None, frozenset({vocabulary.eos}))
        _, prompt_ids, ends = _prompt_ids(kept, _unanswered(prompt, None))
    ids = generate_ids(
        session.assembly,
        averaged_params(session.state),
        prompt_ids,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    decode = session.dataset.decode
    return following(decode, prompt_ids, ids) if is_text else decode(until(ids, ends))


def chat_vocabulary(dataset: Any) -> Any:
    """Returns the tokenizer of a dataset of texts. Raises ValueError if it has none."""
    vocabulary = vocabulary_of(dataset)
    if vocabulary is None:
        raise ValueError(f"a {type(dataset).__name__} has no tokenizer, and so no chat template")
    return vocabulary


def message_ids(vocabulary: Any, content: str) -> list[int]:
    """Returns the ids after which the answer to one message follows. Raises ValueError where the
    chat template refuses it, or there is none."""
    with ChatEncoder(vocabulary) as chat:
        conversation = Conversation([{"role": "user", "content": content}])
        chat.end_of_turn(conversation)
        return chat.prompt(conversation)


def generate_ids(
    assembly: Assembly,
    params: dict[str, Any],
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    top_k: int | None = None,
    seed: int = 0,
) -> list[int]:
    """Returns `tokens` ids after `prompt`, drawn from softmax(z / temperature) over the `top_k`
    likeliest ids, None for all; a temperature of 0 takes the likeliest.

    Parameters stay where they are: XLA partitions the program (GSPMD), whose first operations put
    the layers of pipeline stages in natural order. Raises ValueError, with all that is wrong, on an
    empty prompt, a temperature that is negative or not finite, a top_k below 1, no tokens, or more
    of them than there are learned positions.
    """
    e = assembly.experiment
    return sample_ids(
        assembly.split.static,
        e.model,
        e.precision,
        params,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
        order=partial(params_in_natural_order, assembly),
    )


def generate_text(
    path: str | Path,
    prompt: str | Messages,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    step: int | None = None,
    trust: Trust = (),
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Returns the continuation of `prompt` by the model of RUN or RUN@STEP, or of a folder as
    `transformers` writes it; up to the end of the text, if the model ends it. Takes a run's
    averaged weights where it keeps them.

    prompt: a text, or the messages of a conversation, objects with `role` and `content`, by the
    chat template of the tokenizer: the continuation is then the assistant's next turn. tools:
    descriptions of the tools that it may call. temperature, top_k: as for `generate_ids`. step: of
    a run, None for the newest of its durable checkpoints; newer ones that only the disks of a
    `LocalTier` have are ignored. trust: modules of your own (`"my_package"`, or a tuple) that are
    imported where a run's config.json names their classes or functions; no other code is. Raises
    ValueError as `load` and `generate_ids` do, and where there is no tokenizer, or none for
    conversations.
    """
    conversation = None if isinstance(prompt, str) else _unanswered(prompt, tools)
    raise_violations(sampling_violations(tokens, temperature, seed, top_k))
    model = load(path, step=step, trust=trust)
    if (tokenizer := model.tokenizer) is None:
        reason = f": {model.lacking}" if model.lacking else ""
        raise ValueError(f"{path} has no tokenizer, so nobody can say what its ids are{reason}")
    first, text_ids, ends = _prompt_ids(tokenizer, conversation or str(prompt))
    prompt_ids = [*first, *text_ids]
    raise_violations(_violations(model.config, prompt_ids, tokens, temperature))
    ids = sample_ids(
        static_of(model.config),
        model.config,
        model.precision,
        model.params,
        prompt_ids,
        tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        seed=seed,
    )
    answer, decode = until(ids, ends), tokenizer.vocabulary.decode
    return following(decode, text_ids, answer) if isinstance(prompt, str) else decode(answer)


def _unanswered(messages: Messages, tools: list[dict[str, Any]] | None) -> Conversation:
    """Returns a conversation that the assistant goes on with. Raises ValueError for another."""
    conversation = Conversation(checked_messages(messages), tools)
    if conversation.messages[-1]["role"] == "assistant":
        raise ValueError("the last message is the assistant's; end with one that it answers")
    return conversation


def _prompt_ids(
    tokenizer: KeptTokenizer, prompt: str | Conversation
) -> tuple[list[int], list[int], frozenset[int]]:
    """Returns [bos] if the tokenizer begins texts with it, else []; the ids of the prompt; and the
    ids at which the generated text ends."""
    if isinstance(prompt, str):
        first = [] if tokenizer.bos is None else [tokenizer.bos]
        return first, tokenizer.vocabulary.encode(prompt), tokenizer.ends
    with ChatEncoder(tokenizer.vocabulary) as chat:
        end, ids = chat.end_of_turn(prompt), chat.prompt(prompt)
    return [], ids, tokenizer.ends if end is None else tokenizer.ends | {end}


def sampling_violations(
    tokens: int, temperature: float, seed: int = 0, top_k: int | None = None
) -> list[str]:
    """Returns the violations of these fields of `Sample` and `Experiment`, and of top_k."""
    violations = count("tokens", tokens, 1) or length_violations(tokens)
    violations += seed_violations(seed)
    violations += [] if top_k is None else count("top_k", top_k, 1)
    return violations + temperature_violations(temperature)


def _violations(
    config: ModelConfig, prompt: Sequence[int], tokens: int, temperature: float
) -> list[str]:
    violations, described = sampling_violations(tokens, temperature), config.describe()
    limit = described.positions
    if "generation" not in described.can:
        return [*violations, f"a {type(config).__name__} does not generate: it has no decode()"]
    if not len(prompt):
        violations.append("the prompt has no tokens; give at least one")
    elif not violations and limit is not None and len(prompt) + tokens > limit:
        violations.append(
            f"{len(prompt)} prompt tokens and {tokens} new ones pass the {limit} learned positions"
            f"; use at most {max(limit - len(prompt), 0)} new tokens"
        )
    return violations


def until(ids: list[int], ends: Collection[int]) -> list[int]:
    """Returns the ids before the first that ends a text."""
    return list(takewhile(lambda i: i not in ends, ids))


def following(
    decode: Callable[[Sequence[int]], str], prompt: Sequence[int], ids: Sequence[int]
) -> str:
    """Returns the text of `ids` after `prompt`.

    Both are decoded together, because the decoders of some tokenizers drop the space before the
    first word. `ids` are decoded alone if the joint text does not start with the prompt's own text,
    as where bytes join its last character.
    """
    prefix, text = decode(prompt), decode([*prompt, *ids])
    return text[len(prefix) :] if text.startswith(prefix) else decode(ids)


def sample_ids(
    static: Any,
    config: ModelConfig,
    precision: Precision,
    params: dict[str, Any],
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    top_k: int | None = None,
    seed: int = 0,
    order: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> list[int]:
    """Does the work of `generate_ids` for a model's static form, config and parameters, which
    `order` puts in natural layer order."""
    violations = _violations(config, prompt, tokens, temperature) + seed_violations(seed)
    raise_violations(violations + ([] if top_k is None else count("top_k", top_k, 1)))
    comm = Local(precision.compute)
    ends = _ends(len(prompt), tokens, config.describe().switches)
    run = jax.jit(partial(_generate, static, comm, order, ends, temperature, top_k))
    key = named_key(jax.random.key(seed), "sample")
    with jax.default_matmul_precision(precision.matmul):
        out = run(params, jnp.asarray(prompt, jnp.int32), key)
    return [int(i) for i in out]


def _generate(
    static: Any,
    comm: Local,
    order: Callable[[dict[str, Any]], dict[str, Any]],
    ends: Sequence[int],
    temperature: float,
    top_k: int | None,
    params: dict[str, Any],
    prompt: jax.Array,
    key: jax.Array,
) -> jax.Array:
    model, length = put_together(static, order(params)), len(prompt)

    def choose(logits: jax.Array, number: Any) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        if top_k is not None:
            likeliest = lax.top_k(logits, min(top_k, len(logits)))[1]
            logits = jnp.full_like(logits, -jnp.inf).at[likeliest].set(logits[likeliest])
        sample = jax.random.categorical(jax.random.fold_in(key, number), logits / temperature)
        return sample.astype(jnp.int32)

    def step(carry: Any, number: Any) -> tuple[Any, jax.Array]:
        token, caches = carry
        logits, caches = model.decode(token[None, None], caches, length + number, comm=comm)
        return (choose(logits[0, -1], number + 1), caches), token

    text = prompt
    for end in ends:
        start = len(text) - length
        caches = model.empty_cache(1, ends[-1], comm.compute_dtype)
        logits, caches = model.decode(text[None], caches, jnp.int32(0), comm=comm)
        first = choose(logits[0, -1], start)
        _, sampled = lax.scan(step, (first, caches), jnp.arange(start, end - length))
        text = jnp.concatenate([text, sampled])
    return text[length:]


def _ends(prompt: int, tokens: int, switches: Sequence[int]) -> list[int]:
    """Returns the lengths of the text up to which one cache serves; the last is the full length. A
    new cache is made with the first token beyond a switch."""
    total = prompt + tokens
    return [*(s + 1 for s in switches if prompt <= s < total - 1), total]
