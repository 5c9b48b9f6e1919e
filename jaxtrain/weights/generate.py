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

from jaxtrain.experiment.fields import length_violations, seed_violations
from jaxtrain.experiment.reading import Trust
from jaxtrain.models.layered import ModelConfig
from jaxtrain.nn.communicator import Local
from jaxtrain.nn.module import put_together
from jaxtrain.nn.param import named_key
from jaxtrain.optim.precision import Precision
from jaxtrain.step.assembly import Assembly
from jaxtrain.step.layer_order import params_in_natural_order
from jaxtrain.step.state import TrainState, averaged_params
from jaxtrain.validation.own_attention import SAMPLES, is_standard, kernel_name
from jaxtrain.violations import at_least, count, raise_violations
from jaxtrain.weights.loading import load, static_of


class Sampled(Protocol):
    """What texts are continued with: `train(...).session`, or anything that has these."""

    assembly: Assembly
    state: TrainState
    dataset: Any


def generate(
    session: Sampled,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """The continuation of `prompt` by the model of a run, `train(...).session`, with its averaged
    weights where it keeps them. Raises ValueError as `generate_ids` does, and for a model of the
    user's own.
    """
    described = session.assembly.description
    if described is None or "generation" not in described.can:
        raise ValueError(
            "generate continues texts with a model that describes itself and generates, and this "
            "run has another; sample from it by its own methods, with the parameters of "
            "session.state"
        )
    raise_violations(sampling_violations(tokens, temperature, seed))
    kernel = session.assembly.experiment.execution.attention
    if not is_standard(kernel):
        raise ValueError(
            f"generate {SAMPLES}, and this run was trained with execution.attention="
            f"{kernel_name(kernel)}, a kernel of your own; where it computes the same, say so "
            f"({kernel_name(kernel)}.standard = True)"
        )
    begun = session.dataset.encode(prompt)
    ids = generate_ids(
        session.assembly,
        averaged_params(session.state),
        begun,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
    )
    return following(session.dataset.decode, begun, ids)


def generate_ids(
    assembly: Assembly,
    params: dict[str, Any],
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    seed: int = 0,
) -> list[int]:
    """`tokens` ids after `prompt`, drawn from softmax(z / temperature); 0 takes the likeliest.

    Parameters stay where they are: XLA partitions the program (GSPMD); those on pipeline stages are
    put in natural layer order in it. Raises ValueError, with all that is wrong, on an
    empty prompt, a temperature that is negative or not finite, no tokens, or more of them than
    there are learned positions.
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
        seed=seed,
        order=partial(params_in_natural_order, assembly),
    )


def generate_text(
    path: str | Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    step: int | None = None,
    trust: Trust = (),
) -> str:
    """The continuation of `prompt` by the model of a run directory, or of a folder as
    `transformers` writes it; to the end of the text, if the model ends it. A run's averaged weights
    where it keeps them.

    step: of a run, None for the newest of its durable checkpoints: a newer one that only the disks
    of a `LocalTier` have is not looked at. trust: modules of your own (`"my_package"`, or a tuple)
    that are imported where a run's config.json names their classes or functions; no other code is.
    Raises ValueError as `load` and `generate_ids` do, and where there is no tokenizer: before a
    weight is read.
    """
    raise_violations(sampling_violations(tokens, temperature, seed))
    found = load(path, step=step, trust=trust)
    if (kept := found.tokenizer) is None:
        why = f": {found.lacking}" if found.lacking else ""
        raise ValueError(f"{path} has no tokenizer, so nobody can say what its ids are{why}")
    begun = kept.vocabulary.encode(prompt)
    given = [*([] if kept.bos is None else [kept.bos]), *begun]
    raise_violations(_violations(found.config, given, tokens, temperature))
    ids = sample_ids(
        static_of(found.config),
        found.config,
        found.precision,
        found.params,
        given,
        tokens=tokens,
        temperature=temperature,
        seed=seed,
    )
    return following(kept.vocabulary.decode, begun, until(ids, kept.ends))


def sampling_violations(tokens: int, temperature: float, seed: int = 0) -> list[str]:
    """As `Sample` has them, and `check` of a sample; and as `Experiment` has a seed."""
    found = count("tokens", tokens, 1) or length_violations(tokens)
    found += seed_violations(seed)
    return found + at_least("temperature", temperature, 0)


def _violations(
    config: ModelConfig, prompt: Sequence[int], tokens: int, temperature: float
) -> list[str]:
    found, described = sampling_violations(tokens, temperature), config.describe()
    limit = described.positions
    if "generation" not in described.can:
        return [*found, f"a {type(config).__name__} does not generate: it has no decode()"]
    if not len(prompt):
        found.append("the prompt has no tokens; give at least one")
    elif not found and limit is not None and len(prompt) + tokens > limit:
        found.append(
            f"{len(prompt)} prompt tokens and {tokens} new ones pass the {limit} learned positions"
            f"; use at most {max(limit - len(prompt), 0)} new tokens"
        )
    return found


def until(ids: list[int], ends: Collection[int]) -> list[int]:
    """The ids before the first that ends a text."""
    return list(takewhile(lambda i: i not in ends, ids))


def following(
    decode: Callable[[Sequence[int]], str], prompt: Sequence[int], ids: Sequence[int]
) -> str:
    """The text of `ids` after `prompt`. They are decoded together, for the decoders of some
    tokenizers drop the space before the first word; alone where the prompt does not come out as it
    does by itself, as where bytes join its last character."""
    before, whole = decode(prompt), decode([*prompt, *ids])
    return whole[len(before) :] if whole.startswith(before) else decode(ids)


def sample_ids(
    static: Any,
    config: ModelConfig,
    precision: Precision,
    params: dict[str, Any],
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float,
    seed: int = 0,
    order: Callable[[dict[str, Any]], dict[str, Any]] = dict,
) -> list[int]:
    """`generate_ids` of a model's static form, config and parameters, which `order` puts in natural
    layer order."""
    raise_violations(_violations(config, prompt, tokens, temperature) + seed_violations(seed))
    comm = Local(precision.compute)
    ends = _ends(len(prompt), tokens, config.describe().switches)
    run = jax.jit(partial(_generate, static, comm, order, ends, temperature))
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
    params: dict[str, Any],
    prompt: jax.Array,
    key: jax.Array,
) -> jax.Array:
    model, given = put_together(static, order(params)), len(prompt)

    def choose(logits: jax.Array, at: Any) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
        return drawn.astype(jnp.int32)

    def step(carry: Any, at: Any) -> tuple[Any, jax.Array]:
        token, caches = carry
        logits, caches = model.decode(token[None, None], caches, given + at, comm=comm)
        return (choose(logits[0, -1], at + 1), caches), token

    text = prompt
    for end in ends:
        at = len(text) - given
        caches = model.empty_cache(1, ends[-1], comm.compute_dtype)
        logits, caches = model.decode(text[None], caches, jnp.int32(0), comm=comm)
        first = choose(logits[0, -1], at)
        _, found = lax.scan(step, (first, caches), jnp.arange(at, end - given))
        text = jnp.concatenate([text, found])
    return text[given:]


def _ends(prompt: int, tokens: int, switches: Sequence[int]) -> list[int]:
    """The lengths of the text up to which one cache serves, the last that of all of it: a cache is
    made anew with the first token beyond a switch."""
    whole = prompt + tokens
    return [*(s + 1 for s in switches if prompt <= s < whole - 1), whole]
