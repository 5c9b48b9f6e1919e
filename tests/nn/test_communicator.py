"""`Explicit` inside a shard_map against `Local` on whole arrays: values and gradients of each
operation, with `check_vma` on and off."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.collectives.rows import Padded, Ragged
from jaxtrain.collectives.vary import vary
from jaxtrain.mesh.roles import Roles, roles_of
from jaxtrain.mesh.sharding import fsdp, place, tensor
from jaxtrain.nn.explicit import Explicit
from jaxtrain.nn.gspmd import Gspmd
from jaxtrain.nn.local import Local

AXES = ("data", "fsdp", "tensor")
SIZES = {"data": 1, "fsdp": 2, "tensor": 4}
ROWS, SEQ, EMBED, MLP, VOCAB = 4, 8, 8, 16, 32
TOKENS = ROWS * SEQ

PARAMS = {
    "up": ((EMBED, MLP), ("embed", "mlp")),
    "gate": ((EMBED, MLP), ("embed", "mlp")),
    "down": ((MLP, EMBED), ("mlp", "embed")),
    "norm": ((EMBED,), ("embed",)),
    "table": ((VOCAB, EMBED), ("vocab", "embed")),
}
REST = {
    "up": P("fsdp", "tensor"),
    "gate": P("fsdp", "tensor"),
    "down": P("tensor", "fsdp"),
    "norm": P(),
    "table": P("tensor", "fsdp"),
}
PLACES, _ = place(
    {f"block.{k}": jax.ShapeDtypeStruct(shape, jnp.float32) for k, (shape, _) in PARAMS.items()},
    {f"block.{k}": axes for k, (_, axes) in PARAMS.items()},
    fsdp() | tensor(),
    sizes=SIZES,
)


@pytest.fixture(scope="module")
def mesh():
    shape = tuple(SIZES.values())
    return jax.make_mesh(shape, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 3)


def explicit(**fields):
    roles = roles_of(tensor().activations, SIZES)
    return Explicit(sizes=SIZES, places=PLACES, roles=roles, **fields)


def inputs():
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, (s, _) in PARAMS.items()}
    x = jnp.asarray(rng.normal(size=(TOKENS, EMBED)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, VOCAB, TOKENS), jnp.int32)
    coefficients = jnp.asarray(rng.normal(size=(TOKENS, EMBED)), jnp.float32)
    return params, x, ids, coefficients


def block(comm, params, x, ids):
    """Every operation that has a derivative, in one function: [tokens share, embed]."""
    p, x = comm.gather(params, "block.", x)
    x = x * jnp.expand_dims(p["norm"], 0) + comm.embed(p["table"], ids)
    up, gate = comm.column(x, p["up"], p["gate"])
    return x + comm.row(jnp.tanh(up) * gate, p["down"])


def local_value_and_grads():
    params, x, ids, coefficients = inputs()

    def loss(params, x):
        y = block(Local(), params, x, ids)
        return jnp.sum(y * coefficients), y

    (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
    return y, grads


CHOICES = [
    (Collectives(), False, True),
    (Collectives(), False, False),
    (Collectives(), True, True),
    (Collectives(), True, False),
    (Collectives(Ring(), Ring()), False, True),
    (Collectives(Ring(1, unroll=False), Ring(1, unroll=False)), False, False),
    (Collectives(Recursive(), Recursive()), False, True),
]
"""(algorithms, weights gathered before the block and not in it, check_vma)"""


@pytest.mark.parametrize(("collectives", "whole", "check_vma"), CHOICES, ids=str)
def test_explicit_keeps_the_meaning_of_local(mesh, collectives, whole, check_vma):
    """The residual stream's share of device (i, j) is rows i, tokens j of them."""
    share = P(("data", "fsdp", "tensor"))
    comm = explicit(collectives=collectives)

    def on_device(params, x, ids, coefficients):
        params, x, ids, coefficients = jax.tree.map(
            lambda a: vary(a, AXES), (params, x, ids, coefficients)
        )
        if whole:
            params = comm.fetch(params, "block.")

        def loss(params, x):
            used = comm.pregathered() if whole else comm
            y = block(used, params, x, ids)
            return jnp.sum(y * coefficients), y

        (_, y), (grads, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        if whole:
            grads = comm.scatter(grads, "block.")
        # The axes that a leaf is whole on are reduced after, outside the derivative.
        grads["norm"] = jax.lax.psum(grads["norm"], AXES)
        for name in grads:
            if name != "norm":
                grads[name] = jax.lax.psum(grads[name], "data")
        return y, grads, dx

    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(REST, share, P(("data", "fsdp")), share),
        out_specs=(share, REST, share),
        check_vma=check_vma,
    )
    y, grads, dx = jax.jit(run)(*inputs())
    wanted, (oracle, ox) = local_value_and_grads()
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, ox, rtol=1e-4, atol=1e-4)
    for name in oracle:
        np.testing.assert_allclose(grads[name], oracle[name], rtol=1e-4, atol=1e-4, err_msg=name)


def test_gspmd_keeps_the_meaning_of_local(mesh):
    comm = Gspmd(mesh=mesh, rules=fsdp() | tensor(), places=PLACES)
    params, x, ids, coefficients = inputs()

    def loss(params, x):
        y = comm.constrain(block(comm, params, x, ids), "batch*seq", "embed")
        return jnp.sum(y * coefficients), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    wanted, oracle = local_value_and_grads()
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
    for g, o in zip(jax.tree.leaves(grads), jax.tree.leaves(oracle), strict=True):
        np.testing.assert_allclose(g, o, rtol=1e-4, atol=1e-4)


@pytest.fixture
def uncached():
    """A program found in the compilation cache runs no pass."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("reduce", [jnp.float32, jnp.bfloat16])
def test_gspmd_sums_weight_gradients_in_the_reduce_dtype(mesh, reduce, tmp_path, uncached):
    """Read after the partitioner: XLA:CPU widens 16-bit collectives later."""
    comm = Gspmd(
        jnp.bfloat16, mesh=mesh, rules=fsdp() | tensor(), places=PLACES, reduce_dtype=reduce
    )
    params, x, ids, coefficients = inputs()
    matrices = {k: params[k] for k in ("up", "down", "table")}

    def loss(matrices, x, ids):
        p, x = comm.gather(matrices, "block.", x)
        x = comm.constrain(x.astype(jnp.bfloat16), "batch*seq", "embed")
        (up,) = comm.column(x + comm.embed(p["table"], ids), p["up"])
        y = comm.constrain(comm.row(jnp.tanh(up), p["down"]), "batch*seq", "embed")
        return jnp.sum(y.astype(jnp.float32) * coefficients)

    split = tuple(NamedSharding(mesh, P("fsdp")) for _ in range(2))
    rest = {k: NamedSharding(mesh, REST[k]) for k in matrices}
    jax.jit(jax.grad(loss), in_shardings=(rest, *split)).lower(matrices, x, ids).compile(
        compiler_options={"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    )
    (dump,) = tmp_path.glob("*after_spmd-partitioning*")
    sums = re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:all-reduce|reduce-scatter)\(", dump.read_text())
    weights = {"8,4": "up", "4,8": "down", "8,8": "table"}
    found = {weights[shape]: dtype for dtype, shape in sums if shape in weights}
    assert found == dict.fromkeys(matrices, "f32" if reduce == jnp.float32 else "bf16"), sums
    rows = {dtype for dtype, shape in sums if shape not in weights}
    assert rows == {"bf16"}, f"activations travel in the compute dtype: {sums}"


@pytest.mark.parametrize("check_vma", [True, False])
def test_tokens_and_the_vocabulary(mesh, check_vma):
    """Shares of tokens, sums and maxima over slices of the vocabulary, and the gather of tokens."""
    comm = explicit()
    rng = np.random.default_rng(1)
    z = jnp.asarray(rng.normal(size=(TOKENS, VOCAB)), jnp.float32)
    per_token = jnp.arange(TOKENS)

    def on_device(z, per_token):
        z, per_token = vary(z, AXES), vary(per_token, AXES)
        mine = comm.tokens(per_token)
        offset = vary(jnp.asarray(comm.vocab_offset(z.shape[1])), AXES)
        back = comm.all_tokens(mine)
        parts = comm.scatter_head_gradient(back.astype(jnp.float32))
        return mine, back[None], parts, offset[None], comm.sum_over_vocab(z.sum(-1))[None], (
            comm.max_over_vocab(z.max(-1))[None]
        )  # fmt: skip

    rows, every = ("data", "fsdp"), AXES
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(P(rows, "tensor"), P(rows)),
        out_specs=(P(every), P(every), P(every), P(every), P(every), P(every)),
        check_vma=check_vma,
    )
    mine, back, parts, offset, total, top = jax.jit(run)(z, per_token)
    ways = SIZES["tensor"]
    assert comm.vocab_ways() == ways and Local().vocab_ways() == 1
    np.testing.assert_array_equal(mine, per_token)
    np.testing.assert_array_equal(back, np.repeat(np.split(np.asarray(per_token), 2), ways, axis=0))
    np.testing.assert_array_equal(parts, ways * np.asarray(per_token, np.float32))
    np.testing.assert_array_equal(offset, np.tile(np.arange(ways) * (VOCAB // ways), 2))
    for i, part in enumerate(np.split(np.asarray(z), 2)):
        for j in range(ways):
            np.testing.assert_allclose(total[i * ways + j], part.sum(-1), rtol=1e-4, atol=1e-5)
            np.testing.assert_array_equal(top[i * ways + j], part.max(-1))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_chunks_hold_every_token_once_and_are_undone(mesh, count):
    x = jnp.arange(TOKENS * 3).reshape(TOKENS, 3)
    comm = Gspmd(mesh=mesh, rules=fsdp(), places=PLACES)
    for which in (Local(), explicit(), comm):
        cut = which.chunks(x, count, rows=ROWS)
        assert cut.shape == (count, TOKENS // count, 3)
        np.testing.assert_array_equal(np.sort(cut.reshape(-1)), np.arange(TOKENS * 3))
        np.testing.assert_array_equal(which.unchunk(cut, rows=ROWS), x)
    # Where XLA partitions, each chunk has the same positions of every row.
    cut = comm.chunks(jnp.repeat(jnp.arange(ROWS), SEQ), count, rows=ROWS)
    np.testing.assert_array_equal(cut[0], np.repeat(np.arange(ROWS), SEQ // count))


DTYPES = [(jnp.bfloat16, jnp.float32), (jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.float32)]


@pytest.mark.parametrize(("compute", "reduce"), DTYPES)
def test_gather_sends_the_compute_dtype_and_reduces_in_the_reduce_dtype(mesh, compute, reduce):
    comm = explicit(compute_dtype=compute, reduce_dtype=reduce)
    params = inputs()[0]

    def on_device(params):
        params = jax.tree.map(lambda a: vary(a, AXES), params)
        used = comm.fetch(params, "block.")
        assert {k: v.dtype for k, v in used.items()} == {
            k: jnp.float32 if k == "norm" else compute for k in params
        }

        def loss(params):
            whole, _ = comm.gather(params, "block.", vary(jnp.float32(0), AXES))
            return sum(jnp.sum(v.astype(jnp.float32)) for v in whole.values())

        grads = jax.grad(loss)(params)
        assert all(g.dtype == jnp.float32 for g in grads.values())
        grads["norm"] = jax.lax.pmean(grads["norm"], AXES)
        return {k: g if k == "norm" else jax.lax.pmean(g, "data") for k, g in grads.items()}

    run = jax.shard_map(on_device, mesh=mesh, in_specs=(REST,), out_specs=REST)
    text = str(jax.make_jaxpr(run)(params))
    gathers = [line for line in text.splitlines() if "= all_gather[" in line]
    scatters = [line for line in text.splitlines() if "_scatter[" in line and "=" in line]
    short = {jnp.bfloat16: "bf16[", jnp.float32: "f32["}
    assert gathers and all(f":{short[compute]}" in line for line in gathers), gathers
    assert scatters and all(f":{short[reduce]}" in line for line in scatters), scatters
    # The sum of a matrix has gradient one on each of the two devices that gathered it.
    for name, g in jax.jit(run)(params).items():
        np.testing.assert_array_equal(g, np.full(g.shape, 1.0 if name == "norm" else 2.0))


def test_local_leaves_everything_as_it_is():
    params, x, ids, _ = inputs()
    comm = Local(jnp.bfloat16)
    used, after = comm.gather(params, "", x)
    assert (used["norm"].dtype, used["up"].dtype) == (jnp.float32, jnp.bfloat16)
    assert after is x
    same = (
        *(comm.tokens(x), comm.all_tokens(x), comm.scatter_head_gradient(x)),
        *(comm.sum_over_vocab(x), comm.max_over_vocab(x), comm.constrain(x, "batch*seq", "embed")),
    )
    assert all(y is x for y in same)
    np.testing.assert_array_equal(comm.embed(params["table"], ids), params["table"][ids])


@pytest.mark.parametrize(
    ("rows", "tied"),
    [(Padded(), None), (Ragged(), None), (Padded(Ring()), 7.0), (Padded(Recursive()), 7.0)],
)
def test_permutes_of_rows_are_tied_to_products_of_experts(rows, tied) -> None:
    collectives = Collectives(fsdp=Recursive(), tensor=Lax(), experts=rows)
    comm = Explicit(
        sizes={"expert": 2},
        places={},
        roles=Roles(experts=("expert",)),
        flops_per_byte=5.0,
        flops_per_byte_of_rows=7.0,
        collectives=collectives,
        expert_chunk=5,
    )
    exchanges = []

    def layer(x, leaves, facts, exchange):
        exchanges.append(exchange)
        return x

    comm.experts(layer, jnp.zeros(3), None, None)
    (taken,) = exchanges
    assert (taken.rows, taken.chunk, taken.flops_per_byte) == (rows, 5, tied)


def test_attend_is_split_over_rows_and_heads(mesh):
    """A kernel that sees what it was given: its own rows, and query heads with their key heads."""
    comm = Gspmd(mesh=mesh, rules=fsdp() | tensor(), places=PLACES)
    rng = np.random.default_rng(2)
    q, k = (jnp.asarray(rng.normal(size=(ROWS, 4, heads, 2)), jnp.float32) for heads in (8, 4))
    segments = jnp.asarray(rng.integers(0, 3, (ROWS, 4)), jnp.int32)

    def kernel(q, k, v, segments):
        return q * jnp.repeat(k + v, 2, axis=2) * segments[:, :, None, None]

    def seen(q, k, v, segments):
        assert (q.shape, k.shape, segments.shape) == ((2, 4, 2, 2), (2, 4, 1, 2), (2, 4))
        return kernel(q, k, v, segments)

    found = jax.jit(lambda *a: comm.attend(seen, *a))(q, k, k, segments)
    np.testing.assert_allclose(found, kernel(q, k, k, segments), rtol=1e-6)
    none = jax.jit(lambda *a: comm.attend(lambda q, k, v, s: q + v.sum(), *a, None))(q, k, k)
    assert none.shape == q.shape
