"""Kernels of grouped matmuls against products in fp64, one expert at a time: those of Pallas run in
Python here."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import NEW_JAX, TRITON_IS_DEPRECATED, abstract_gpus
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.mesh import make_mesh, mesh_from_axes
from jaxtrain.moe import triton_blocks
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.moe.grouped import Asked, GroupedMatmul, group_sizes, grouped_matmul
from jaxtrain.moe.kernels import PlatformGroupedMatmul, choose, settled
from jaxtrain.moe.layer import ExpertLayer, ExpertLeaves
from jaxtrain.moe.megablox import Megablox
from jaxtrain.moe.mosaic_blocks import MosaicBlocks
from jaxtrain.moe.rows import plan_rows
from jaxtrain.moe.tiles import GROUPED, place_of
from jaxtrain.moe.triton_blocks import TritonBlocks
from jaxtrain.transformer.feed_forward import silu

TRITON = TritonBlocks(largest_block=32, columns=32, depth=16, interpret=True)
MEGABLOX = Megablox(tile=(128, 128, 128), interpret=True)
MOSAIC = MosaicBlocks(largest_block=64, columns=64, interpret=True)
LOOP = BlockLoop(largest_block=32)


class Case(NamedTuple):
    """sizes: rows of each expert, before padding."""

    sizes: tuple[int, ...]
    embed: int = 48
    hidden: int = 80


CASES = [
    Case((100, 0, 156)),
    Case((0, 0, 127, 1)),
    Case((384,), 32, 16),
    Case((1, 2, 250, 3, 0), 200, 144),
]
"""Uneven, empty at either end and between; blocks with one row; dims no tile divides."""


def laid_out(case: Case, kernel: GroupedMatmul, dtype: Any) -> dict[str, Any]:
    """Rows as the kernel wants them, noise where they are padded."""
    rng = np.random.default_rng(len(case.sizes))
    experts = len(case.sizes)
    chosen = rng.permutation(np.repeat(np.arange(experts), case.sizes))[:, None].astype(np.int32)
    plan = plan_rows(jnp.asarray(chosen), experts, kernel.largest_block)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    rows = len(plan.slots)
    return dict(
        rows=normal(rows, case.embed),
        weights=normal(experts, case.embed, case.hidden),
        dy=normal(rows, case.hidden),
        owners=plan.owners,
    )


def by_hand(given: dict[str, Any]) -> list[np.ndarray]:
    """y, and the gradients of rows and weights."""
    rows, weights, dy = (np.asarray(given[k], np.float64) for k in ("rows", "weights", "dy"))
    owner = np.repeat(given["owners"], len(rows) // len(given["owners"]))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(rows), np.zeros_like(weights)
    for expert, w in enumerate(weights):
        mine = owner == expert
        y[mine], dx[mine] = rows[mine] @ w, dy[mine] @ w.T
        dw[expert] = rows[mine].T @ dy[mine]
    return [y, dx, dw]


def everything(kernel: GroupedMatmul, given: dict[str, Any]) -> list[jax.Array]:
    y, back = jax.vjp(
        lambda rows, weights: grouped_matmul(kernel, rows, weights, given["owners"]),
        *(given["rows"], given["weights"]),
    )
    return [y, *back(given["dy"])]


def assert_near(found: list[jax.Array], wanted: list[np.ndarray], bound: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.shape == b.shape
        assert np.abs(np.asarray(a, np.float64) - b).max() <= bound * max(np.abs(b).max(), 1.0)


@pytest.mark.parametrize("kernel", [LOOP, TRITON, MEGABLOX], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_and_gradients_are_each_experts_own(case: Case, kernel: GroupedMatmul) -> None:
    given = laid_out(case, kernel, jnp.float32)
    assert_near(everything(kernel, given), by_hand(given), 1e-5)


@pytest.mark.parametrize("kernel", [TRITON, MEGABLOX], ids=lambda k: type(k).__name__)
def test_in_bf16_sums_are_fp32(kernel: GroupedMatmul) -> None:
    """512 rows of ones to one expert: in bf16 the sum over blocks would stay at 256."""
    given = laid_out(Case((0, 512), 16, 16), kernel, jnp.bfloat16)
    ones = {k: jnp.ones_like(v) for k, v in given.items() if k != "owners"}
    y, dx, dw = everything(kernel, given | ones)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16,) * 3
    rows = len(given["rows"])
    sizes = group_sizes(given["owners"], 2, rows)
    np.testing.assert_array_equal(np.asarray(dw[:, 0, 0], np.float32), sizes)
    assert float(dw[1, 0, 0]) >= 512


MOSAICS = [
    ((0, 2, 2), 64, 128, 64, MOSAIC, jnp.float16),
    ((1, 1, 1, 2), 128, 192, 64, replace(MOSAIC, stages=2), jnp.bfloat16),
    ((0, 0), 192, 64, 64, replace(MOSAIC, columns=128, depth=128, stages=2), jnp.bfloat16),
    ((0, 0, 1), 128, 256, 128, replace(MOSAIC, columns=128, largest_block=128), jnp.bfloat16),
]
"""(owner of each block, embed, hidden, rows of a block, kernel, dtype)"""


@NEW_JAX
@pytest.mark.parametrize(("owners", "embed", "hidden", "block", "kernel", "dtype"), MOSAICS)
def test_mosaics_products_are_right(
    owners: tuple[int, ...], embed: int, hidden: int, block: int, kernel: MosaicBlocks, dtype: Any
) -> None:
    """By JAX's simulator of a GPU, in which copies and stores that race are raised, and memory that
    nobody wrote is NaN. Sums are fp32: what is left is the rounding of results. Experts without a
    block are first, between and last."""
    rng, rows = np.random.default_rng(0), block * len(owners)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    given = dict(
        rows=normal(rows, embed),
        weights=normal(4, embed, hidden),
        dy=normal(rows, hidden),
        owners=jnp.asarray(owners, jnp.int32),
    )
    found = everything(kernel, given)
    assert all(a.dtype == dtype for a in found)
    assert_near(found, by_hand(given), float(jnp.finfo(dtype).eps) / 2)


@NEW_JAX
@pytest.mark.parametrize("check_vma", [True, False])
def test_mosaic_is_traced_and_lowered_whether_types_are_checked_or_not(check_vma: bool) -> None:
    """Two products, their gradients by rows and by weights; of the default tiles."""
    both, inputs = sharded_layer(
        MosaicBlocks(),
        check_vma=check_vma,
        dtype=jnp.bfloat16,
        mesh=abstract_gpus(data=2),
        dims=(256, 512),
        tokens=2048,
    )
    traced = both.trace(*inputs)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 6
    # Products run on beside the next, no longer; those of the simulator are done at once.
    program = str(traced.jaxpr)
    assert program.count("wgmma_wait[n=1]") == 6 and program.count("commit_smem") == 6


@NEW_JAX
@pytest.mark.parametrize(
    "kernel",
    [
        MosaicBlocks(largest_block=64, columns=256, stages=5),
        MosaicBlocks(largest_block=256, columns=64, stages=5),
        MosaicBlocks(depth=128, stages=3),
        MosaicBlocks(stages=7),
    ],
    ids=str,
)
def test_tiles_that_are_taken_are_lowered(kernel: MosaicBlocks) -> None:
    """Into shared memory and registers: Mosaic raises where they do not fit."""
    given = jax.eval_shape(lambda: laid_out(Case((700, 40), 512, 768), kernel, jnp.bfloat16))
    run = jax.jit(lambda given: everything(kernel, given))
    text = run.trace(given).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 3


TOO_LARGE = [
    (dict(columns=512), "columns=512 .* 256 .*; use columns=128"),
    (dict(largest_block=256), "largest_block=256 x columns=128 .*; use largest_block=128"),
    (dict(stages=8), "stages=8 .* 262,144 bytes .* 232,448; use stages=7"),
    (dict(largest_block=64, columns=256, stages=6), "stages=6 .* use stages=5"),
    (dict(largest_block=32, depth=96), "largest_block=32.*; depth=96"),
    (dict(largest_block=64, stages=8), "stages=8 .* 262,144 bytes .*; use stages=7"),
    (dict(stages=0), "stages=0"),
    (dict(stages=1), "stages=1 .* 2 or more"),
    (dict(depth=512), "stages=3 with depth=512 take 786,432 bytes .*; use depth=64$"),
    (dict(depth=1024, stages=16), "depth=1024 .*; use depth=64 and stages=7$"),
]


@pytest.mark.parametrize(("options", "told"), TOO_LARGE, ids=str)
def test_tiles_that_no_hopper_holds_are_refused_with_those_that_it_does(
    options: dict[str, int], told: str
) -> None:
    with pytest.raises(ValueError, match=f"(?s){told}") as refused:
        MosaicBlocks(**options)
    remedy = re.findall(r"(\w+)=(\d+)", str(refused.value).partition("use ")[2])
    if remedy:
        MosaicBlocks(**options | {name: int(value) for name, value in remedy})


def sharded_layer(
    kernel: Any,
    *,
    check_vma: bool,
    dtype: Any = jnp.float32,
    mesh: Any = None,
    dims: tuple[int, int] = (16, 32),
    tokens: int = 256,
) -> tuple[Any, Any]:
    """A layer in a shard_map over the tokens of two devices, of CPUs here or of `mesh`: what gives
    its output and gradients, and its inputs."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), dtype)

    embed, hidden = dims
    weights = normal(4, embed, hidden), normal(4, hidden, embed)
    inputs = normal(tokens, embed), normal(embed, 4), weights

    def local(x: jax.Array, router: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
        if check_vma:
            x, router, weights = jax.tree.map(lambda a: vary(a, ("data",)), (x, router, weights))
        return ExpertLayer(2, silu, kernel=kernel)(x, ExpertLeaves(router, weights))

    run = jax.shard_map(
        local,
        mesh=mesh or make_mesh(mesh_from_axes(data=2)),
        in_specs=(P("data"), P(), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )

    @jax.jit
    def both(*inputs: Any) -> Any:
        y, back = jax.vjp(run, *inputs)
        return y, back(jnp.cos(y))

    return both, inputs


@pytest.mark.parametrize("kernel", [TRITON, MEGABLOX], ids=lambda k: type(k).__name__)
def test_a_layer_is_the_same_in_a_shard_map(kernel: GroupedMatmul) -> None:
    both, inputs = sharded_layer(LOOP, check_vma=True)
    wanted = jax.tree.leaves(both(*inputs))
    both, inputs = sharded_layer(kernel, check_vma=False)
    assert_near(jax.tree.leaves(both(*inputs)), wanted, 1e-5)


@TRITON_IS_DEPRECATED
@pytest.mark.parametrize("check_vma", [True, False])
def test_triton_is_traced_and_lowered_whether_types_are_checked_or_not(check_vma: bool) -> None:
    """Two products, their gradients by rows and by weights."""
    both, inputs = sharded_layer(
        TritonBlocks(), check_vma=check_vma, dtype=jnp.bfloat16, mesh=abstract_gpus(data=2)
    )
    traced = both.trace(*inputs)
    assert str(traced.jaxpr).count("pallas_call[") == 6
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @__gpu$xla.gpu.triton") == 6


def test_tiles_of_a_product_are_each_made_once_by_neighbours() -> None:
    """Whatever the number of rows and columns of tiles; those of `GROUPED` x `GROUPED` programs
    that follow each other lie in as many rows and columns."""
    for rows, columns in ((1, 5), (8, 3), (19, 4), (16, 16)):
        places = [place_of(jnp.int32(i), rows, columns) for i in range(rows * columns)]
        found = [(int(row), int(column)) for row, column in places]
        assert sorted(found) == [(i, j) for i in range(rows) for j in range(columns)]
    together = found[: GROUPED**2]
    assert [len({each[i] for each in together}) for i in (0, 1)] == [GROUPED, GROUPED]


ASKED = Asked(4096, 8, 512, 1024, jnp.dtype(jnp.bfloat16))
CHOICES = [
    ("tpu", {}, Megablox),
    ("gpu", {}, TritonBlocks),
    ("gpu", {"checked": True}, TritonBlocks),
    ("cpu", {}, BlockLoop),
    ("tpu", {"checked": True}, BlockLoop),
    ("tpu", {"rows": 4096 + 64}, BlockLoop),
    ("gpu", {"embed": 520}, BlockLoop),
    ("gpu", {"hidden": 1000}, BlockLoop),
    ("gpu", {"rows": 64}, BlockLoop),
    ("gpu", {"experts": 4096}, BlockLoop),
    ("gpu", {"dtype": jnp.dtype(jnp.float32)}, BlockLoop),
    ("tpu", {"dtype": jnp.dtype(jnp.float32)}, BlockLoop),
    ("tpu", {"dtype": jnp.dtype(jnp.float16)}, BlockLoop),
    ("metal", {}, BlockLoop),
]


@pytest.mark.parametrize(("platform", "change", "kind"), CHOICES, ids=str)
def test_each_platform_has_its_kernel_and_says_where_it_has_none(
    platform: str, change: dict[str, Any], kind: type
) -> None:
    asked = ASKED._replace(**change)
    found = choose(platform, asked, 9)
    assert type(found) is kind and not found.violations(asked)
    slow = kind is BlockLoop and platform != "cpu"
    told = pytest.warns(UserWarning, match="run as a loop over blocks") if slow else nullcontext()
    with told:
        assert settled(PlatformGroupedMatmul(platform, 9), asked) == found
    assert settled(None, asked) == BlockLoop()  # this backend's


@NEW_JAX
def test_mosaic_takes_tritons_place_on_hopper_once_jax_has_no_triton(monkeypatch) -> None:
    """And on Hopper alone: where the GPU is another, or not known, the loop runs, with reasons."""
    assert type(choose("gpu", ASKED, 9)) is TritonBlocks
    monkeypatch.setattr(triton_blocks, "TRITON", "experimental/pallas/no_triton.py")
    assert choose("gpu", ASKED, 9) == settled(PlatformGroupedMatmul("gpu", 9), ASKED)
    assert choose("gpu", ASKED, 9) == MosaicBlocks()
    for capability, told in ((8, "the GPU has 8"), (None, "an unknown one")):
        assert choose("cuda", ASKED, capability) == BlockLoop()
        lost = "TritonBlocks: JAX .* has no jax.experimental.pallas.no_triton any more"
        with pytest.warns(UserWarning, match=f"{lost}; MosaicBlocks: .* capability 9, .*{told}"):
            settled(PlatformGroupedMatmul("gpu", capability), ASKED)


MOST_ROWS = 2**21 - 8 * 127 - 1
"""Rows of 1024 numbers: seven experts with one row each fill a block of 128 each, the eighth whole
blocks. One more row makes 2**21 with their padding, of 2**31 numbers."""

REFUSED = [
    (Megablox(), {"checked": True}, "check_vma=True"),
    (Megablox(), {"rows": 200}, "200 rows .* no multiple of 128"),
    (Megablox(), {"dtype": jnp.dtype(jnp.float16)}, "float16 is not supported"),
    (TritonBlocks(), {"dtype": jnp.dtype(jnp.float32)}, "float32 is not supported"),
    (TritonBlocks(), {"embed": 1000, "hidden": 1000}, "embed=1000 .*hidden=1000"),
    (TritonBlocks(), {"rows": 64}, "blocks of 8, at least 16"),
    (TritonBlocks(), {"experts": 4096, "rows": 2**20}, "2147483648 numbers in the experts' matr"),
    (TritonBlocks(), {"rows": MOST_ROWS + 1}, "2147483648 numbers in the rows padded to whole"),
    *(
        pytest.param(MosaicBlocks(), change, told, marks=NEW_JAX)
        for change, told in (
            ({"dtype": jnp.dtype(jnp.float32)}, "float32 is not supported"),
            ({"embed": 544, "hidden": 1000}, "embed=544 .*64; hidden=1000 .*64"),
            ({"rows": 1024}, "blocks of 32, at least 64"),
        )
    ),
]


@pytest.mark.parametrize(("kernel", "change", "told"), REFUSED, ids=str)
def test_one_that_is_asked_for_by_name_is_refused(
    kernel: GroupedMatmul, change: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=f"grouped_matmul={type(kernel).__name__}.*{told}"):
        settled(kernel, ASKED._replace(**change))
    assert settled(kernel, ASKED) is kernel


def test_rows_are_counted_with_their_padding() -> None:
    assert not TritonBlocks().violations(ASKED._replace(rows=MOST_ROWS))
    assert len(TritonBlocks().violations(ASKED._replace(rows=MOST_ROWS + 1))) == 1
