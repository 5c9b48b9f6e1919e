"""Peak rates of the chip alone: products, copies, launches. Other results are compared with
them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.bench_gpu.setting import Setting
from jaxtrain.bench_gpu.timing import timed
from jaxtrain.mesh.sharding import partition_spec

DTYPES = {"bfloat16": jnp.bfloat16, "float32": jnp.float32}


def calibrate(setting: Setting, _: str) -> None:
    """Reports a row for each rate."""
    sizes, tell = setting.sizes, setting.tell

    def row(name: str, call: Callable[[], object], unit: str, amount: float) -> float:
        measured = timed(call, round_s=sizes.round_s)
        rate = amount / measured.seconds
        tell({"row": name, unit: rate, "us": measured.seconds * 1e6, "spread": measured.spread})
        return rate

    for name, dtype in DTYPES.items():
        n = sizes.matmul if dtype == jnp.bfloat16 else sizes.matmul // 2
        a, b = (jax.random.normal(jax.random.key(i), (n, n), dtype) for i in range(2))
        precision = None if dtype == jnp.bfloat16 else lax.Precision.HIGHEST  # no TF32
        product = jax.jit(partial(jnp.matmul, precision=precision))
        rate = row(f"matmul {name} {n}", lambda: product(a, b), "tflops", 2e-12 * n**3)  # noqa: B023
        tell({"row": f"matmul {name} {n}", "of_peak": setting.share(rate * 1e12, name)})
    x = jnp.zeros(sizes.copied // 4, jnp.float32)
    added = jax.jit(lambda x: x + 1)
    rate = row("copy, read and written", lambda: added(x), "gbytes_per_s", 2e-9 * x.nbytes)
    peak = setting.chip.hbm_bandwidth_gbytes
    tell({"row": "copy, read and written", "of_peak": rate / peak})
    host_array = np.ones(sizes.copied // 16, np.float32)
    row(
        "host to device",
        lambda: jax.device_put(host_array),
        "gbytes_per_s",
        1e-9 * host_array.nbytes,
    )
    part = x[: len(host_array)]
    row("device to host", lambda: np.asarray(part + 0), "gbytes_per_s", 1e-9 * part.nbytes)
    small = jnp.ones((128, 128), jnp.bfloat16)
    row("calls of a program a second", lambda: added(small), "calls_per_s", 1)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, sizes.launches, lambda _, x: (x @ small) * 0.01, x)

    row("turns of a loop of one product", lambda: chain(small), "turns_per_s", sizes.launches)
    tell({"row": "shard_map with check_vma", "runs": _typed_shard_map()})


def _typed_shard_map() -> bool:
    """True if a shard_map with check_vma, with a sum over an axis, gives the right result here."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    split, replicated = partition_spec((("a",),)), partition_spec(())
    summed = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(jnp.sum(x), "a"),
            mesh=mesh,
            in_specs=split,
            out_specs=replicated,
            check_vma=True,
        )
    )
    return float(summed(jnp.arange(8.0))) == 28
