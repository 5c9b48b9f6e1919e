"""A continuation sampled from the model being trained, with a key-value cache."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.nn.communicator import Local
from jaxtrain.nn.module import put_together
from jaxtrain.nn.param import named_key
from jaxtrain.train.assembly import Assembly
from jaxtrain.train.natural import in_order

if TYPE_CHECKING:
    from jaxtrain.train.session import Session


def generate(
    session: Session,
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
    if not session.assembly.built_in:
        raise ValueError("generate needs a DecoderConfig; a model of one's own has its own way")
    ids = generate_ids(
        session.assembly,
        session.state.ema or session.state.params,
        session.dataset.encode(prompt),
        tokens=tokens,
        temperature=temperature,
        seed=seed,
    )
    return session.dataset.decode(ids)


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
    put in natural layer order in it. Raises ValueError on an
    empty prompt, a negative temperature, or more tokens than there are learned positions.
    """
    config = assembly.experiment.model
    limit = config.learned_positions
    if not len(prompt):
        raise ValueError("the prompt has no tokens; give at least one")
    if temperature < 0:
        raise ValueError(f"temperature={temperature}; use 0 for greedy or a positive number")
    if limit is not None and len(prompt) + tokens > limit:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {tokens} new ones pass the {limit} learned positions"
            f"; use at most {max(limit - len(prompt), 0)} new tokens"
        )
    run = jax.jit(partial(_generate, assembly, tokens, temperature))
    key = named_key(jax.random.key(seed), "sample")
    with jax.default_matmul_precision(assembly.experiment.precision.matmul):
        out = run(params, jnp.asarray(prompt, jnp.int32), key)
    return [int(i) for i in out]


def _generate(
    assembly: Assembly,
    tokens: int,
    temperature: float,
    params: dict[str, Any],
    prompt: jax.Array,
    key: jax.Array,
) -> jax.Array:
    model = put_together(assembly.split.static, in_order(assembly, params))
    comm = Local(assembly.experiment.precision.compute)
    caches = model.empty_cache(1, len(prompt) + tokens, comm.compute_dtype)

    def choose(logits: jax.Array, at: Any) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits).astype(jnp.int32)
        drawn = jax.random.categorical(jax.random.fold_in(key, at), logits / temperature)
        return drawn.astype(jnp.int32)

    def step(carry: Any, at: Any) -> tuple[Any, jax.Array]:
        token, caches = carry
        index = len(prompt) + at
        logits, caches = model.decode(token[None, None], caches, index, comm=comm)
        return (choose(logits[0, -1], at + 1), caches), token

    logits, caches = model.decode(prompt[None], caches, jnp.int32(0), comm=comm)
    first = choose(logits[0, -1], 0)
    return lax.scan(step, (first, caches), jnp.arange(tokens))[1]
