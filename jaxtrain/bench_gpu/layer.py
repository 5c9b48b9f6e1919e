"""One layer of attention by each kernel of the platform: compared with the dense reference in fp32,
outputs and gradients, and timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.cudnn import GPU_BLOCKS, Cudnn
from jaxtrain.attention.documents import document_starts
from jaxtrain.attention.kernels import AttentionKernel, Reference
from jaxtrain.attention.online_softmax import AttentionMask, Scoring
from jaxtrain.attention.splash import Splash
from jaxtrain.attention.triton import Triton
from jaxtrain.bench_gpu.documents import SyntheticDocuments
from jaxtrain.bench_gpu.setting import AttentionShape, Row, Setting, Skipped
from jaxtrain.bench_gpu.timing import timed
from jaxtrain.hopper.attention import FlashAttention
from jaxtrain.telemetry.flops import AttentionFlops

LayerArrays = tuple[jax.Array, ...]

KERNELS: dict[str, AttentionKernel] = {
    "cudnn": Cudnn(),
    "triton": Triton(),
    "splash": Splash(),
    "mosaic": FlashAttention(),
    "blockwise": GPU_BLOCKS,
    "blockwise_1024": Blockwise(query_block=1024, key_block=1024),
}
INTERPRETED: dict[str, AttentionKernel] = {
    "triton": Triton(interpret=True),
    "splash": Splash(interpret=True),
}
"""What a dry run, which is on a CPU, measures instead."""
CASES = {"documents": True, "whole rows": False}
"""Whether rows are packed documents."""
BACKWARD = 2.5
"""Products of a fused backward pass over those of the forward one: five for two (Dao 2023)."""


def measure(setting: Setting, name: str) -> None:
    """Reports a kernel's rows: errors in the cases it supports, then seconds of each layer."""
    kernel = KERNELS[name]
    if setting.dry and name in INTERPRETED:
        kernel = INTERPRETED[name]
    else:
        require(setting, kernel)
    window = setting.sizes.window
    for case, packed in CASES.items():
        _tell(setting, f"checked, {case}", partial(check, setting, kernel, packed))
    windowed = partial(check, setting, kernel, True, window)
    _tell(setting, f"checked, documents and window {window}", windowed)
    for layer, shape in setting.sizes.layers.items():
        for case, packed in CASES.items():
            timing = partial(_timed, setting, kernel, shape, packed)
            _tell(setting, f"layer of {layer}, {case}", timing)


def require(setting: Setting, kernel: object) -> None:
    """Raises Skipped for a kernel of another platform, or of another kind of GPU."""
    platform = getattr(kernel, "runs_on", setting.platform)
    if platform != setting.platform:
        raise Skipped(f"the kernel runs on {platform}, and this is {setting.platform}")
    capability = getattr(kernel, "gpu_capability", None)
    if capability is not None and capability != setting.chip.capability:
        raise Skipped(f"the kernel runs on Hopper GPUs, and this is {setting.chip.name}")


def _tell(setting: Setting, row: str, find: Callable[[], Row]) -> None:
    """Reports a row, or that the kernel refuses the case."""
    try:
        setting.tell({"row": row} | find())
    except ValueError as error:
        setting.tell({"row": row, "refused": str(error)})


def check(
    setting: Setting, kernel: AttentionKernel, packed: bool, window: int | None = None
) -> Row:
    """Returns the largest error of o, the log-sum-exp and each gradient, over the largest value of
    the reference's for the same inputs in fp32."""
    shape = setting.sizes.checked
    arrays, do, starts = operands(shape, setting.sizes.mean, packed)
    scoring = Scoring(AttentionMask(window=window), scale=shape.head_dim**-0.5, softcap=None)

    def outputs(
        kernel: AttentionKernel, starts: jax.Array | None, *arrays: jax.Array
    ) -> LayerArrays:
        def both(q: jax.Array, k: jax.Array, v: jax.Array) -> LayerArrays:
            return kernel(q, k, v, starts, scoring)

        (o, lse), pull = jax.vjp(both, *arrays)
        return o, lse, *pull((do.astype(o.dtype), jnp.zeros_like(lse)))

    results = jax.jit(partial(outputs, kernel))(starts, *arrays)
    with jax.default_matmul_precision("highest"):
        fp32_arrays = (x.astype(jnp.float32) for x in arrays)
        expected = jax.jit(partial(outputs, Reference()))(starts, *fp32_arrays)
    names = ("o", "lse", "dq", "dk", "dv")
    pairs = zip(names, results, expected, strict=True)
    return {f"{name}_error": error(a, b) for name, a, b in pairs}


def error(result: jax.Array, expected: jax.Array) -> float:
    """Returns max |result - expected| / max |expected|; NaN where one of them is."""
    a, b = (np.asarray(x, np.float32) for x in (result, expected))
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def _timed(setting: Setting, kernel: AttentionKernel, shape: AttentionShape, packed: bool) -> Row:
    sizes = setting.sizes
    arrays, do, starts = operands(shape, sizes.mean, packed)
    scoring = Scoring(AttentionMask(), scale=shape.head_dim**-0.5, softcap=None)

    @jax.jit
    def forward(starts: jax.Array | None, *arrays: jax.Array) -> jax.Array:
        q, k, v = arrays
        return kernel(q, k, v, starts, scoring)[0]

    @jax.jit
    def both(starts: jax.Array | None, *arrays: jax.Array) -> LayerArrays:
        return jax.vjp(partial(forward, starts), *arrays)[1](do)

    one_pass = timed(lambda: forward(starts, *arrays), round_s=sizes.round_s)
    both_passes = timed(lambda: both(starts, *arrays), round_s=sizes.round_s)
    flops = (1 + BACKWARD) * AttentionFlops(shape.heads, shape.head_dim).flops(pairs(shape, starts))
    return {
        "forward_ms": one_pass.seconds * 1e3,
        "both_ms": both_passes.seconds * 1e3,
        "spread": both_passes.spread,
        "tflops": flops / both_passes.seconds / 1e12,
        "of_peak": setting.share(flops / both_passes.seconds),
    }


def pairs(shape: AttentionShape, starts: jax.Array | None) -> int:
    """Returns the number of (query, key) pairs that are not masked, in all rows: the work of a
    kernel that skips the others."""
    if starts is None:
        return shape.rows * shape.seq * (shape.seq + 1) // 2
    seen = np.arange(1, shape.seq + 1)[None] - np.asarray(starts)
    return int(seen.sum())


def operands(
    shape: AttentionShape, mean: int, packed: bool
) -> tuple[LayerArrays, jax.Array, jax.Array | None]:
    """(q, k, v), the cotangent of o, and where documents start (None: rows are whole)."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
    *arrays, do = (
        jax.random.normal(
            jax.random.key(i), (shape.rows, shape.seq, n, shape.head_dim), jnp.bfloat16
        )
        for i, n in enumerate(heads)
    )
    if not packed:
        return tuple(arrays), do, None
    rows = SyntheticDocuments(2, shape.seq, mean).open("train", seed=0, cache_dir=Path())
    segments = rows.rows(np.arange(shape.rows))["segments"]
    return tuple(arrays), do, document_starts(jnp.asarray(segments))
