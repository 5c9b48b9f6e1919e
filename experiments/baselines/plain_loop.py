"""Plain jax + optax, nothing in the way: one jitted train step of a small Llama-like decoder.

The yardstick of `jaxtrain bench step`, which starts it with --turns. By itself:

python experiments/baselines/plain_loop.py --case one|fsdp8|tp2fsdp4 --dtype fp32|bf16

prints one JSON line; step_s is the median after 4 warm-up steps. Weights are sharded by
NamedSharding, XLA chooses the collectives. It is kept plain on purpose: no scan, no remat, dense
attention, whole logits. A case is [tpT][fsdpF], any T and F that divide the sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

STARTED = time.time()

import jax  # noqa: E402 (the clock starts before the imports)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

LEARNING_RATE, B1, B2, EPS, WEIGHT_DECAY, CLIP = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0
NORM_EPS, ROPE_THETA, SUCCESSORS, WARMUP = 1e-5, 1e4, 4, 4
DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True)
class Sizes:
    layers: int = 4
    embed: int = 256
    heads: int = 8
    hidden: int = 1024
    vocab: int = 4096
    seq: int = 256
    batch: int = 16


def weights(s: Sizes) -> dict[str, Any]:
    """name -> (shape, sharding) of every weight, layers in a list."""
    head_dim = s.embed // s.heads
    wide, deep = (s.embed, s.heads, head_dim), (s.heads, head_dim, s.embed)
    layer = {
        "query": (wide, P("fsdp", "tensor", None)),
        "key": (wide, P("fsdp", "tensor", None)),
        "value": (wide, P("fsdp", "tensor", None)),
        "out": (deep, P("tensor", None, "fsdp")),
        "gate": ((s.embed, s.hidden), P("fsdp", "tensor")),
        "up": ((s.embed, s.hidden), P("fsdp", "tensor")),
        "down": ((s.hidden, s.embed), P("tensor", "fsdp")),
        "attention_norm": ((s.embed,), P()),
        "mlp_norm": ((s.embed,), P()),
    }
    return {
        "embedding": ((s.vocab, s.embed), P("fsdp", None)),
        "head": ((s.embed, s.vocab), P("fsdp", "tensor")),
        "norm": ((s.embed,), P()),
        "layers": [layer] * s.layers,
    }


def _is_weight(node: Any) -> bool:
    return isinstance(node, tuple)


def init(key: jax.Array, *, sizes: Sizes) -> Any:
    """Norms at one, everything else from N(0, 0.02^2)."""
    leaves, tree = jax.tree.flatten(weights(sizes), is_leaf=_is_weight)
    keys = jax.random.split(key, len(leaves))
    made = [
        jnp.ones(shape) if len(shape) == 1 else 0.02 * jax.random.normal(k, shape)
        for k, (shape, _) in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + NORM_EPS)
    return y.astype(x.dtype) * scale.astype(x.dtype)


def rotate(x: jax.Array) -> jax.Array:
    """RoPE of x [batch, seq, heads, head_dim]."""
    seq, head_dim = x.shape[1], x.shape[-1]
    angles = jnp.arange(seq)[:, None] * ROPE_THETA ** (-jnp.arange(0, head_dim, 2) / head_dim)
    cos, sin = (f(angles)[:, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [batch, seq, heads, head_dim], all scores at once, softmax in fp32."""
    seq, head_dim = q.shape[1], q.shape[-1]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * head_dim**-0.5
    scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1).astype(q.dtype), v)


def block(x: jax.Array, w: dict[str, jax.Array], constrain: Callable[..., Any]) -> jax.Array:
    w = jax.tree.map(lambda leaf: leaf.astype(x.dtype), w)
    h = norm(x, w["attention_norm"])
    q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[name]) for name in ("query", "key", "value"))
    o = attend(rotate(q), rotate(k), v)
    # einsum contracts in alphabetical order: with "hd" it would transpose the weights first.
    x = constrain(x + jnp.einsum("bshx,hxe->bse", o, w["out"]))
    h = norm(x, w["mlp_norm"])
    return constrain(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"])


def loss_of(params: Any, tokens: jax.Array, *, dtype: Any, constrain: Callable[..., Any]) -> Any:
    """Mean cross-entropy of tokens [batch, seq + 1], each predicted from those before it."""
    x = constrain(params["embedding"].astype(dtype)[tokens[:, :-1]])
    for layer in params["layers"]:
        x = block(x, layer, constrain)
    logits = (norm(x, params["norm"]) @ params["head"].astype(dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def optimizer() -> optax.GradientTransformation:
    adamw = optax.adamw(LEARNING_RATE, B1, B2, EPS, weight_decay=WEIGHT_DECAY)
    return optax.chain(optax.clip_by_global_norm(CLIP), adamw)


def chain(sizes: Sizes, batches: int = 4) -> np.ndarray:
    """Batches of a random bigram chain, [batches, batch, seq + 1]: a token has 4 successors."""
    rng = np.random.default_rng(0)
    following = rng.integers(0, sizes.vocab, (sizes.vocab, SUCCESSORS))
    tokens = np.zeros((batches, sizes.batch, sizes.seq + 1), np.int32)
    tokens[..., 0] = rng.integers(0, sizes.vocab, tokens.shape[:2])
    for i in range(sizes.seq):
        choice = rng.integers(0, SUCCESSORS, tokens.shape[:2])
        tokens[..., i + 1] = following[tokens[..., i], choice]
    return tokens


class PlainLoop:
    """The compiled step and its state; `run_step` runs and times one step."""

    def __init__(self, sizes: Sizes, mesh: Mesh, dtype: Any) -> None:
        def sharding(spec: P) -> NamedSharding:
            return NamedSharding(mesh, spec)

        def constrain(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, rows) if mesh.size > 1 else x

        def step(params: Any, state: Any, tokens: jax.Array) -> Any:
            value, grads = jax.value_and_grad(loss)(params, tokens)
            updates, state = transform.update(grads, state, params)
            return optax.apply_updates(params, updates), state, value

        loss = partial(loss_of, dtype=dtype, constrain=constrain)
        rows, whole, transform = sharding(P("fsdp")), sharding(P()), optimizer()
        where = jax.tree.map(lambda w: sharding(w[1]), weights(sizes), is_leaf=_is_weight)
        self.params = jax.jit(partial(init, sizes=sizes), out_shardings=where)(jax.random.key(0))
        state = jax.jit(transform.init)(self.params)
        of_state = optax.tree_map_params(
            transform.init, lambda _, s: s, state, where, transform_non_params=lambda _: whole
        )
        self.state = jax.device_put(state, of_state)
        self.rows, self.data, self.steps = rows, chain(sizes), 0
        began = time.perf_counter()
        jitted = jax.jit(
            step,
            donate_argnums=(0, 1),
            in_shardings=(where, of_state, rows),
            out_shardings=(where, of_state, None),
        )
        tokens = jax.ShapeDtypeStruct(self.data.shape[1:], jnp.int32)
        self.program = jitted.lower(self.params, self.state, tokens).compile()
        self.compile_s = time.perf_counter() - began

    def run_step(self) -> dict[str, float]:
        began = time.perf_counter()
        tokens = jax.device_put(self.data[self.steps % len(self.data)], self.rows)
        self.params, self.state, loss = self.program(self.params, self.state, tokens)
        jax.block_until_ready((self.params, self.state, loss))
        self.steps += 1
        return {"step_s": time.perf_counter() - began, "loss": float(loss)}

    def program_bytes(self) -> int:
        """What the compiled step needs on one device."""
        m: Any = self.program.memory_analysis()
        return (
            m.argument_size_in_bytes
            + m.output_size_in_bytes
            - m.alias_size_in_bytes
            + m.temp_size_in_bytes
        )


def peak_bytes() -> int:
    """The most the first device has held, or, where it does not count (CPU), this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    status = Path("/proc/self/status")
    if status.exists():
        # Linux starts ru_maxrss at the peak of the process that forked; VmHWM is this program's.
        found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
        if found:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def take_turns(loop: PlainLoop, first: dict[str, float]) -> None:
    """`step` on stdin runs a step and answers with a JSON line; anything else, or its end, ends."""
    print(json.dumps({"compile_s": loop.compile_s, **first}), flush=True)
    for line in sys.stdin:
        if line != "step\n":
            break
        print(json.dumps(loop.run_step()), flush=True)
    last = {"peak_bytes": peak_bytes(), "program_bytes": loop.program_bytes()}
    print(json.dumps(last), flush=True)


def make_mesh(case: str) -> Mesh:
    """`one`, `fsdp8`, `tp2fsdp4`: that many fake CPU devices, unless XLA_FLAGS has a number."""
    found = re.fullmatch(r"one|(?:tp(\d+))?(?:fsdp(\d+))?", case)
    if not case or not found:
        raise SystemExit(f"--case {case}: write one, fsdp8, tp2fsdp4 or other sizes of the two")
    tensor, fsdp = (int(n or 1) for n in found.groups())
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", fsdp * tensor)
    devices = jax.devices()[: fsdp * tensor]
    return Mesh(np.array(devices).reshape(fsdp, tensor), ("fsdp", "tensor"))


def main() -> None:
    parser = argparse.ArgumentParser(description="a plain jax + optax train step, timed")
    parser.add_argument("--case", default="one")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    parser.add_argument("--steps", type=int, default=14, help="warm-up included")
    parser.add_argument("--turns", action="store_true", help="one step for each line on stdin")
    for each in fields(Sizes):
        parser.add_argument(f"--{each.name}", type=int, default=each.default)
    options = parser.parse_args()
    sizes = Sizes(**{each.name: getattr(options, each.name) for each in fields(Sizes)})
    mesh = make_mesh(options.case)
    # Accelerators take fp32 matmuls to mean TF32 or bf16 passes, unless told.
    with jax.default_matmul_precision("highest" if options.dtype == "fp32" else "default"):
        loop = PlainLoop(sizes, mesh, DTYPES[options.dtype])
    first = loop.run_step()
    first_step_s = time.time() - STARTED
    if options.turns:
        return take_turns(loop, first)
    found = [first, *(loop.run_step() for _ in range(options.steps - 1))]
    print(
        json.dumps(
            {
                "case": options.case,
                "dtype": options.dtype,
                "step_s": statistics.median([f["step_s"] for f in found][WARMUP:] or [0.0]),
                "compile_s": loop.compile_s,
                "first_step_s": first_step_s,
                "peak_bytes": peak_bytes(),
                "loss": found[-1]["loss"],
            }
        )
    )


if __name__ == "__main__":
    main()
