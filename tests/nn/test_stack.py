"""The written-out loop over layers against a Python loop under ordinary autodiff; what it keeps."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.named import all_gather, sum_scatter
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.vary import vary
from jaxtrain.nn.remat import REMAT, remat, remat_violations
from jaxtrain.nn.stack import LayerLoop, Layers
from tests.permutes import all_equations, bodies, tied_permutes

TOKENS, EMBED, HIDDEN, WAYS = 6, 8, 24, 4

LOOPS = [
    LayerLoop(unroll=True, reshard_after_forward=True),
    LayerLoop(unroll=True, reshard_after_forward=False),
    *(
        LayerLoop(prefetch=prefetch, reshard_after_forward=reshard)
        for prefetch, reshard in itertools.product((True, False), repeat=2)
    ),
]
ALL_LOOPS = [replace(loop, remat=remat) for loop in LOOPS for remat in REMAT]


def sample(cases, keep):
    """All cases; those not kept run with the slow tests."""
    many = lambda case: case if isinstance(case, tuple) else (case,)  # noqa: E731
    return [c if keep(c) else pytest.param(*many(c), marks=pytest.mark.slow) for c in cases]


def name_of(loop):
    how = "unrolled" if loop.unroll else ("prefetched" if loop.prefetch else "scanned")
    return f"{how}-{loop.remat}-{'reshard' if loop.reshard_after_forward else 'keep'}"


class Extras(NamedTuple):
    """What a block is given that has no derivative: integers, a table, a key."""

    positions: jax.Array
    table: jax.Array
    key: jax.Array


def extras():
    at = jnp.arange(TOKENS, dtype=jnp.int32)
    return Extras(at, jnp.cos(at.astype(jnp.float32)), jax.random.key(7))


def body(w, x, extras, layer):
    """Matrices, vectors, a key, a name that policies save, and the layer's number."""
    h = jnp.tanh((x * w["scale"][None]) @ w["up"] + w["bias"][None])
    h = checkpoint_name(h * extras.table[:, None], "attention_out")
    by_key = 0.1 * jax.random.key_data(extras.key)[-1].astype(jnp.float32)
    return x + (h @ w["down"]) * (by_key + 0.1 * layer) + 0.01 * extras.positions[:, None]


def shards(layers, ways=WAYS):
    """Parameters at rest: a quarter of each matrix's rows."""
    rng = np.random.default_rng(0)
    shapes = {"up": (EMBED // ways, HIDDEN), "down": (HIDDEN // ways, EMBED), "scale": (EMBED,),
              "bias": (HIDDEN,)}  # fmt: skip
    return {
        k: jnp.asarray(0.5 * rng.normal(size=(layers, *s)), jnp.float32) for k, s in shapes.items()
    }


def fetch(p):
    """A stand-in for a gather: the four quarters are alike."""
    return {k: jnp.tile(v, (WAYS, 1)) if v.ndim > 1 else v for k, v in p.items()}


def scatter(g):
    return {k: v.reshape(WAYS, -1, v.shape[1]).sum(0) if v.ndim > 1 else v for k, v in g.items()}


def ours(params, x, loop):
    return Layers(body, fetch, scatter, loop)(params, x, extras())


def plain(params, x, extras=extras, fetch=fetch):
    for layer in range(len(params["up"])):
        x = body(fetch({k: v[layer] for k, v in params.items()}), x, extras(), layer)
    return x


def value_and_grads(run, layers):
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(TOKENS, EMBED)), jnp.float32)
    dy = jnp.asarray(rng.normal(size=(TOKENS, EMBED)), jnp.float32)

    def loss(params, x):
        y = run(params, x)
        return jnp.sum(y * dy), y

    (_, y), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(shards(layers), x)
    return {"y": y, **grads[0], "x": grads[1]}


@pytest.fixture(scope="module")
def oracle():
    return {layers: value_and_grads(plain, layers) for layers in (1, 2, 3)}


def assert_same(found, wanted):
    for name, value in wanted.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-6 * scale, err_msg=name)


@pytest.mark.parametrize(
    "loop",
    sample(
        ALL_LOOPS, lambda loop: loop.remat == "full" or loop == replace(LOOPS[2], remat=loop.remat)
    ),
    ids=name_of,
)
@pytest.mark.sampled(3)
def test_values_and_gradients_equal_a_python_loop(loop, oracle):
    assert_same(value_and_grads(lambda p, x: ours(p, x, loop), 3), oracle[3])


@pytest.mark.parametrize("layers", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loop", LOOPS, ids=name_of)
def test_one_and_two_layers(loop, layers, oracle):
    assert_same(value_and_grads(lambda p, x: ours(p, x, loop), layers), oracle[layers])


@pytest.mark.parametrize("loop", LOOPS[1:3], ids=name_of)
def test_without_a_derivative_the_value_is_the_same(loop, oracle):
    x = jnp.asarray(np.random.default_rng(1).normal(size=(TOKENS, EMBED)), jnp.float32)
    np.testing.assert_allclose(ours(shards(3), x, loop), oracle[3]["y"], rtol=1e-5, atol=1e-5)


def residuals(loop, layers=5):
    """Shapes of everything that the backward pass is given, other than its arguments."""
    x = jnp.ones((TOKENS, EMBED))
    pull_back = jax.eval_shape(lambda p, x: jax.vjp(lambda p, x: ours(p, x, loop), p, x)[1],
                               shards(layers), x)  # fmt: skip
    found = [leaf.shape for leaf in jax.tree.leaves(pull_back)]
    for leaf in (*jax.tree.leaves(shards(layers)), *jax.tree.leaves(extras())):
        if leaf.shape in found:
            found.remove(leaf.shape)
    return found


def is_weight(shape):
    return shape[-2:] in ((EMBED, HIDDEN), (HIDDEN, EMBED), (HIDDEN, HIDDEN), (EMBED, EMBED))


@pytest.mark.parametrize("loop", ALL_LOOPS, ids=name_of)
def test_weights_are_kept_only_when_asked(loop):
    """But for the last layer's, with which the backward pass of a prefetching loop begins."""
    kept = [shape for shape in residuals(loop) if is_weight(shape)]
    if loop.reshard_after_forward:
        assert len(kept) == (2 if loop.prefetch and not loop.unroll else 0)
        assert all(len(shape) == 2 for shape in kept)
    else:
        layers = sum(shape[0] if len(shape) == 3 else 1 for shape in kept)
        assert layers == 2 * 5, kept  # two matrices a layer


@pytest.mark.parametrize(
    "loop", [loop for loop in LOOPS if loop.reshard_after_forward], ids=name_of
)
@pytest.mark.parametrize(
    ("remat", "names"),
    # How many arrays a layer [tokens, embed] and [tokens, hidden] are kept, at most: the block's
    # input; the named one; the two products.
    [("full", (1, 0)), ("attention", (1, 1)), ("dots", (2, 1)), ("dots_and_attention", (2, 2))],
)
def test_only_block_inputs_and_what_the_policy_names_are_kept(loop, remat, names):
    found = residuals(replace(loop, remat=remat))
    counts = [0, 0]
    for shape in found:
        if shape[-2:] in ((TOKENS, EMBED), (TOKENS, HIDDEN)):
            counts[shape[-1] == HIDDEN] += shape[0] if len(shape) == 3 else 1
    layers = 5
    assert counts[0] <= names[0] * layers and counts[1] <= names[1] * layers, found
    assert counts[0] >= layers, "block inputs are kept"
    saved = {"full": 0, "attention": 1, "dots": 1, "dots_and_attention": 2}[remat]
    assert counts[1] >= min(saved, 1) * layers, f"{remat} saves nothing: {found}"


OFFLOADED = [
    # What of a layer lies in the host's memory, [tokens, embed] and [tokens, hidden]: see above.
    (LOOPS[0], "full", ("input",), (1, 0)),
    (LOOPS[2], "full", ("input",), (1, 0)),
    (LOOPS[2], "attention", ("attention",), (0, 1)),
    (LOOPS[4], "dots", ("dots",), (0, 1)),
    (LOOPS[2], "dots_and_attention", ("attention", "input"), (1, 1)),
    (LOOPS[0], "dots_and_attention", ("input", "dots", "attention"), (1, 2)),
]


@pytest.mark.parametrize(("loop", "remat", "offload", "names"), OFFLOADED, ids=str)
def test_what_is_offloaded_lies_in_the_hosts_memory(loop, remat, offload, names, oracle):
    """To the byte, and nothing else does; gradients are those of a Python loop."""
    loop = replace(loop, remat=remat, offload=offload)
    pull_back = lambda p, x: jax.vjp(lambda p, x: ours(p, x, loop), p, x)[1]  # noqa: E731
    layers = 3
    kept = jax.make_jaxpr(pull_back)(shards(layers), jnp.ones((TOKENS, EMBED))).out_avals
    counts = [0, 0]
    for each in kept:
        if each.memory_space == jax.memory.Space.Host:
            counts[each.shape[-1] == HIDDEN] += each.shape[0] if each.ndim == 3 else 1
    assert counts == [n * layers for n in names], kept
    assert_same(value_and_grads(lambda p, x: ours(p, x, loop), layers), oracle[layers])


@pytest.mark.parametrize(
    ("remat", "offload", "why"),
    [
        ("none", ("input",), "offload=('input',) goes by names; use remat='dots_and_attention'"),
        (
            "dots",
            ("heads",),
            "offload has 'heads'; what can be offloaded is input, attention, dots",
        ),
        ("full", ("dots",), "remat='full' does not save; use remat='dots', or take it out"),
        ("dots", ("attention",), "use remat='dots_and_attention', or take it out"),
    ],
)
def test_only_what_is_saved_can_be_offloaded(remat, offload, why):
    (told,) = remat_violations(remat, offload)
    assert why in told
    with pytest.raises(ValueError, match=re.escape(why)):
        jax.eval_shape(
            lambda p, x: jax.vjp(lambda x: ours(p, x, LayerLoop(remat=remat, offload=offload)), x)[
                0
            ],
            shards(2),
            jnp.ones((TOKENS, EMBED)),
        )


def test_unknown_remat():
    with pytest.raises(ValueError, match="remat='dot' is unknown; the policies are none, full,"):
        remat(body, "dot")


DEVICES = 8


ROWS = P("fsdp")
SPLIT = {"up": P(None, "fsdp"), "down": P(None, "fsdp"), "scale": P(), "bias": P()}
SPLIT_EXTRAS = Extras(ROWS, ROWS, P())


def gather_and_scatter(by):
    """What fetches matrices split over fsdp, and its adjoint; by: what moves them."""

    def gathered(p):
        return {k: all_gather(v, ("fsdp",), 0, by) if v.ndim > 1 else v for k, v in p.items()}

    def summed(g):
        return {
            k: sum_scatter("weight gradients", v, ("fsdp",), 0, by) if v.ndim > 1 else v
            for k, v in g.items()
        }

    return gathered, summed


def on_mesh(loop, *, devices=DEVICES, by=Lax(), flops_per_byte=None, check_vma=True):  # noqa: B008
    """Loss and gradients of a batch split over fsdp, weights too; by: what moves those."""
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    gathered, summed = gather_and_scatter(by)

    def on_device(params, x, dy, extras):
        params, x, dy, extras = jax.tree.map(lambda a: vary(a, ("fsdp",)), (params, x, dy, extras))
        layers = Layers(body, gathered, summed, loop, flops_per_byte=flops_per_byte)

        def loss(params, x):
            y = layers(params, x, extras)
            return jnp.sum(y * dy), y

        (_, y), (grads, dx) = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, x)
        grads = {k: g if g.ndim > 2 else jax.lax.psum(g, "fsdp") for k, g in grads.items()}
        return y, grads, dx

    return jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(SPLIT, ROWS, ROWS, SPLIT_EXTRAS),
            out_specs=(ROWS, SPLIT, ROWS),
            check_vma=check_vma,
        )
    )


def a_batch(layers, tokens=16):
    rng = np.random.default_rng(1)
    x, dy = (jnp.asarray(rng.normal(size=(tokens, EMBED)), jnp.float32) for _ in range(2))
    at = jnp.arange(tokens, dtype=jnp.int32)
    return shards(layers, ways=1), x, dy, Extras(at, jnp.cos(at), jax.random.key(7))


@pytest.mark.parametrize(
    ("loop", "check_vma"),
    sample(
        [(replace(loop, remat="dots"), vma) for loop in LOOPS for vma in (True, False)]
        + [(replace(LOOPS[2], remat="dots", offload=("input", "dots")), True)],
        lambda case: case[1] or (case[0].prefetch and not case[0].unroll),
    ),
)
def test_sharded_over_eight_devices(loop, check_vma):
    params, x, dy, given = a_batch(3)

    def loss(params, x):
        y = plain(params, x, extras=lambda: given, fetch=lambda p: p)
        return jnp.sum(y * dy), y

    (_, wanted), oracle = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, x)
    y, grads, dx = on_mesh(loop, check_vma=check_vma)(params, x, dy, given)
    assert_same({"y": y, "x": dx, **grads}, {"y": wanted, "x": oracle[1], **oracle[0]})


@pytest.mark.parametrize("prefetch", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_grows_by_shards_and_inputs_not_by_gathered_weights(prefetch):
    """Temporary memory at two depths, from the compiler: the layers between them add their saved
    inputs and the shards of their gradients; weights, two layers' at most."""
    embed, hidden, tokens = 256, 512, 8 * DEVICES
    gathered = 2 * embed * hidden * 4

    def temp(loop, layers):
        def shape(*dims, dtype=jnp.float32):
            return jax.ShapeDtypeStruct(dims, dtype)

        params = {"up": shape(layers, embed, hidden), "down": shape(layers, hidden, embed),
                  "scale": shape(layers, embed), "bias": shape(layers, hidden)}  # fmt: skip
        x, at = shape(tokens, embed), shape(tokens, dtype=jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        lowered = on_mesh(loop).lower(params, x, x, Extras(at, shape(tokens), key))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    shallow, deep = 4, 20
    loop = LayerLoop(prefetch=prefetch)
    growth = temp(loop, deep) - temp(loop, shallow)
    per_layer = gathered // DEVICES + tokens // DEVICES * embed * 4 + 8 * (embed + hidden)
    assert growth <= 2 * gathered + (deep - shallow) * per_layer * 1.1
    # The control: keeping weights costs every layer's, and the analysis sees it.
    kept = replace(loop, reshard_after_forward=False)
    assert temp(kept, deep) - temp(kept, shallow) >= (deep - shallow) * gathered


def by_permutes(loop, *, tied, check_vma=True):
    """The same by permutes of ours, on four devices."""
    pace = 0.0 if tied else None
    return on_mesh(loop, devices=4, by=Recursive(), flops_per_byte=pace, check_vma=check_vma)


@pytest.mark.parametrize("keep", [False, True], ids=["fetched again", "kept"])
@pytest.mark.parametrize(
    "remat", ["none", *(pytest.param(k, marks=pytest.mark.slow) for k in REMAT if k != "none")]
)
@pytest.mark.sampled(3)
def test_permutes_tied_to_products_change_nothing(remat, keep):
    """But how a compiler rounds (in whole numbers no bit: `test_alongside.py`). Of one layer, of
    two, and of three."""
    loop = LayerLoop(remat=remat, reshard_after_forward=not keep)
    for layers in (1, 2, 3):
        tied, untied = (by_permutes(loop, tied=each)(*a_batch(layers)) for each in (True, False))
        found, wanted = (dict(enumerate(jax.tree.leaves(each))) for each in (tied, untied))
        assert_same(found, wanted)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_every_permute_of_a_loop_is_tied_to_a_product(remat):
    """And outside of loops those of the last layer's pull-back; alone are the first layer's fetch
    and its gradients' scatter: two hops of two matrices each."""
    traced = by_permutes(LayerLoop(remat=remat), tied=True, check_vma=False).trace(*a_batch(4))
    hops = 2 * 2  # of a gather, and of a scatter: two of each of two matrices
    every = [e for e in all_equations(traced.jaxpr.jaxpr) if e.primitive.name == "ppermute"]
    alone = hops + hops
    assert len(every) == alone + hops + hops + (hops + hops)
    _, outside, forward, backward = map(tied_permutes, bodies(traced.jaxpr.jaxpr))
    assert [len(outside), len(forward), len(backward)] == [hops, hops, hops + hops]
