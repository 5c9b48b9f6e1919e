"""Steps and bytes against the traced and the compiled programs, times against closed forms."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec as P

from jaxtrain.collectives import algorithm as collective
from jaxtrain.collectives.cost import (
    ALGORITHMS,
    best,
    compressed_all_reduce,
    cost,
    count,
    double_tree,
    hierarchical,
    step_us,
    traffic,
)
from jaxtrain.collectives.cost.steps import COLLECTIVES, PADDED, schedule
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.mesh.hardware import LINKS, Link
from jaxtrain.program import collectives as hlo

KERNELS = {
    "ring_1": Ring(1),
    "ring_2": Ring(2),
    "ring_1_looped": Ring(1, unroll=False),
    "ring_2_looped": Ring(2, unroll=False),
    "recursive": Recursive(),
}
SIZES = (1, 2, 3, 4, 5, 8)
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
SWITCH = Link("a switch", 10, 3, 1, "made up")
TORUS = Link("a 2-D torus", 40, 3, 4, "made up: 10 GB/s a port")


def elements(name, n):
    """Of the whole buffer: what takes any number gets one that n does not divide."""
    return 6 * n + 1 if name in PADDED else 6 * n


def program(names, n, dtype, by, root):
    """(function of one array for each collective, the arrays' shapes), inside a shard_map."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:n]), ("data",))

    def one(name, x):
        where = {"all_to_all": (0, 0), "all_reduce": (), "broadcast": (root,), "reduce": (root,)}
        rooted = {"gather": (0, root), "scatter": (0, root)}
        with jax.named_scope(f"the_{name}"):
            return getattr(collective, name)(x, ("data",), *(where | rooted).get(name, (0,)), by)

    run = jax.shard_map(
        lambda xs: [one(name, x) for name, x in zip(names, xs, strict=True)],
        mesh=mesh, in_specs=P("data"), out_specs=P("data"),
    )  # fmt: skip
    held = [1 if name in ("all_gather", "gather") else n for name in names]
    shapes = [
        jax.ShapeDtypeStruct((elements(name, n) * h,), dtype)
        for name, h in zip(names, held, strict=True)
    ]
    return run, shapes


def permutes(jaxpr, times=1):
    """(pairs, bytes a sender sends, dtype) of every ppermute of a traced program, as often as it
    runs."""
    found = Counter()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "ppermute":
            (x,) = eqn.invars
            nbytes = math.prod(x.aval.shape) * x.aval.dtype.itemsize
            found[frozenset(map(tuple, eqn.params["perm"])), nbytes, x.aval.dtype.name] += times
        again = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inside = [
            permutes(getattr(inner, "jaxpr", inner), times * again)
            for inner in jaxprs_in_params(eqn.params)
        ]
        if eqn.primitive.name == "cond":  # a program for each platform, which sends the same
            assert all(each == inside[0] for each in inside)
            inside = inside[:1]
        assert eqn.primitive.name != "while" or not any(inside)
        found += sum(inside, Counter())
    return found


def pairs(permute, n):
    if permute.exchange:
        return frozenset((i, i ^ permute.distance) for i in permute.senders)
    return frozenset((i % n, (i + permute.distance) % n) for i in permute.senders)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("algorithm", KERNELS)
def test_steps_are_the_traced_permutes(algorithm, n, dtype):
    root = n // 2
    for name in COLLECTIVES:
        run, shapes = program([name], n, dtype, KERNELS[algorithm], root)
        traced = permutes(jax.make_jaxpr(run)(shapes).jaxpr)
        buffer_bytes = elements(name, n) * jnp.dtype(dtype).itemsize

        said = Counter()
        for step in schedule(name, algorithm, n, buffer_bytes, dtype):
            for permute in step.permutes:
                shifted = frozenset(((a + root) % n, (b + root) % n) for a, b in pairs(permute, n))
                # Only what has a root is numbered from it.
                symmetric = len(permute.senders) == n or name == "all_reduce"
                at = pairs(permute, n) if symmetric else shifted
                said[at, permute.nbytes, permute.dtype] += step.times
        assert said == traced, f"{name} {algorithm}"

        sent = Counter()
        for (edges, nbytes, _), times in traced.items():
            for sender, _ in edges:
                sent[sender] += nbytes * times
        found = traffic(name, algorithm, n, buffer_bytes, dtype)
        assert found.device_bytes == max(sent.values(), default=0), name
        assert found.total_bytes == sent.total(), name
        assert found.messages == sum(len(edges) * k for (edges, *_), k in traced.items()), name


def compiled(names, n, by):
    """The collectives of one program that has all of `names`, in fp32."""
    run, shapes = program(names, n, "float32", by, n // 2)
    return hlo.collectives(jax.jit(run).lower(shapes).compile().as_text())


@pytest.mark.parametrize(
    "n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in SIZES if n != 3)]
)
@pytest.mark.parametrize("algorithm", KERNELS)
@pytest.mark.sampled(5)
def test_steps_are_the_compiled_permutes(algorithm, n):
    said, found = Counter(), Counter()
    for name in COLLECTIVES:
        for step in schedule(name, algorithm, n, 4 * elements(name, n)):
            for permute in step.permutes:
                said[name, permute.nbytes] += step.times
    for line in compiled(COLLECTIVES, n, KERNELS[algorithm]):
        assert line.kind == "collective-permute" and line.dtype == "f32"
        found[re.search(r"the_(\w+?)/", line.op_name)[1], line.buffer_bytes] += line.count
    assert found == said


@pytest.mark.parametrize("n", SIZES)
def test_what_lax_sends_is_what_the_compiled_program_says(n):
    for name in COLLECTIVES:  # a program each: XLA combines their all-reduces
        sent = sum(line.total_wire_bytes for line in compiled([name], n, Lax()))
        said = traffic(name, "lax", n, 4 * elements(name, n)).device_bytes
        assert sent == pytest.approx(said, rel=1e-12), name


def up(n):
    return math.ceil(math.log2(n))


A, B = SWITCH.latency_us, SWITCH.bandwidth_gbytes * 1e3  # us, bytes per us
POWERS = (2, 4, 8, 64)
ANY = (2, 3, 5, 8, 12, 64)
FORMULAE = [
    ("ring_1", "all_gather", ANY, lambda n, b: (n - 1) * A + (n - 1) / n * b / B),
    ("ring_1", "reduce_scatter", ANY, lambda n, b: (n - 1) * A + (n - 1) / n * b / B),
    ("ring_1", "all_reduce", ANY, lambda n, b: 2 * (n - 1) * A + 2 * (n - 1) / n * b / B),
    ("ring_1", "all_to_all", ANY, lambda n, b: (n - 1) * A + (n - 1) / n * b / B),
    ("ring_1", "broadcast", ANY, lambda n, b: 2 * (n - 1) * A + 2 * (n - 1) / n * b / B),
    ("ring_1_looped", "all_to_all", ANY, lambda n, b: (n - 1) * (A + (n - 1) / n * b / B)),
    ("ring_2", "all_gather", ANY, lambda n, b: n // 2 * A + (n - 1) / n * b / B),
    ("ring_2", "all_reduce", ANY, lambda n, b: 2 * (n // 2) * A + 2 * (n - 1) / n * b / B),
    ("ring_2", "all_to_all", ANY, lambda n, b: n // 2 * A + (n - 1) / n * b / B),
    ("recursive", "all_gather", ANY, lambda n, b: up(n) * A + (n - 1) / n * b / B),
    ("recursive", "reduce_scatter", ANY, lambda n, b: up(n) * A + (n - 1) / n * b / B),
    ("recursive", "all_reduce", POWERS, lambda n, b: up(n) * (A + b / B)),
    ("recursive", "all_reduce", (3, 5, 12), lambda n, b: (up(n) - 1 + 2) * (A + b / B)),
    ("recursive", "all_to_all", POWERS, lambda n, b: up(n) * (A + b / 2 / B)),
    ("recursive", "broadcast", ANY, lambda n, b: up(n) * (A + b / B)),
    ("recursive", "reduce", ANY, lambda n, b: up(n) * (A + b / B)),
    ("recursive", "scatter", POWERS, lambda n, b: up(n) * A + (n - 1) / n * b / B),
    ("recursive", "gather", POWERS, lambda n, b: up(n) * A + (n - 1) / n * b / B),
]


@pytest.mark.parametrize(("algorithm", "name", "sizes", "formula"), FORMULAE)
def test_times_over_a_switch_are_the_published_ones(algorithm, name, sizes, formula):
    for n, tile in itertools.product(sizes, (0, 4, 4096)):
        found = cost(name, algorithm, n, n * tile, SWITCH).time_us
        assert found == pytest.approx(formula(n, n * tile), rel=1e-12), n


@pytest.mark.parametrize("algorithm", ["ring_1", "ring_2", "lax"])
def test_rings_send_the_fewest_bytes_and_half_of_them_in_16_bits(algorithm):
    for n in (2, 3, 8, 4096):
        whole = 4 * n * 10
        for name, part in {
            "all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1
        }.items():  # fmt: skip
            sent = traffic(name, algorithm, n, whole)
            assert sent.device_bytes * n == part * (n - 1) * whole
            assert sent.total_bytes == part * (n - 1) * whole
        narrow = traffic("all_reduce", algorithm, n, whole // 2, "bfloat16").total_bytes
        assert narrow == (n - 1) * whole


def walked(permute, n):
    """(most messages over one link to the right, to the left, hops of the farthest) in a ring."""
    links, farthest = Counter(), 0
    for source, target in pairs(permute, n):
        right = (target - source) % n
        hops = min(right, n - right)
        way = -1 if right > hops or (permute.exchange and source > target) else 1
        for h in range(hops):
            links[way, (source + way * h - (way < 0)) % n] += 1
        farthest = max(farthest, hops)
    most = [max((k for (w, _), k in links.items() if w == way), default=0) for way in (1, -1)]
    return *most, farthest


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 12, 16])
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a != "double_tree"])
def test_a_torus_ring_counts_what_each_link_passes(algorithm, n):
    for name in COLLECTIVES:
        for step in schedule(name, algorithm, n, 4 * n):
            right = left = longest = 0
            for permute in step.permutes:
                to_right, to_left, hops = walked(permute, n)
                right += to_right * permute.nbytes
                left += to_left * permute.nbytes
                longest = max(longest, hops)
            expected = longest * 3 + max(right, left) / (10 * 1e3)
            assert step_us(step, n, TORUS) == pytest.approx(expected, rel=1e-12), (name, step)


def test_two_directions_halve_a_torus_ring_and_only_the_latency_of_a_switch():
    n, b = 9, 9 * 2**20
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        one, two = (cost(name, f"ring_{d}", n, b, TORUS).time_us for d in (1, 2))
        assert two == pytest.approx(one / 2)
        one, two = (cost(name, f"ring_{d}", n, b, SWITCH) for d in (1, 2))
        assert one.time_us - two.time_us == pytest.approx(one.traffic.steps / 2 * A)


@pytest.mark.parametrize("n", [4, 8, 64, 512])
def test_small_all_reduces_are_recursive_and_large_ones_rings(n):
    """log2 n (a + b/B) = 2(n-1) a + 2(n-1)/n b/B at one b, on both sides of which another wins."""
    assert n > 2, "on two devices both send as much"
    turn = (2 * (n - 1) - up(n)) * A / ((up(n) - 2 * (n - 1) / n) / B)
    names = ("recursive", "ring_1")
    for factor, winner in ((0.01, 0), (0.98, 0), (1.02, 1), (100, 1)):
        b = round(turn * factor / 4 / n) * 4 * n
        ranked = best("all_reduce", n, b, SWITCH, candidates=names)
        assert ranked[0].algorithm == names[winner], factor
        assert ranked[0].time_us < ranked[1].time_us


@pytest.mark.parametrize("link", [SWITCH, TORUS, *LINKS.values()], ids=lambda link: link.name)
def test_cost_grows_with_bytes_and_best_is_sorted(link):
    for name, n in itertools.product(COLLECTIVES, (2, 6)):
        before = {}
        for b in (0, 4 * n, 2**20 * n):
            ranked = best(name, n, b, link)
            times = [each.time_us for each in ranked]
            assert times == sorted(times)
            trees = name == "all_reduce" and link.ports == 1
            assert {each.algorithm for each in ranked} == set(ALGORITHMS[: None if trees else -1])
            now = {each.algorithm: each.time_us for each in ranked}
            assert all(now[a] > t for a, t in before.items())
            before = now


def test_one_device_costs_nothing():
    for name, algorithm in itertools.product(COLLECTIVES, ALGORITHMS):
        if algorithm != "double_tree" or name == "all_reduce":
            found = cost(name, algorithm, 1, 4, SWITCH)
            assert found.time_us == 0 and found.traffic == count([], 1)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13, 14, 64, 100, 1023, 1024])
def test_double_trees_are_two_binary_trees_and_no_device_sends_over_twice_the_buffer(n):
    trees = double_tree(n)
    inner = []
    for parents in trees:
        (root,) = set(range(n)) - set(parents)
        assert max(Counter(parents.values()).values()) <= 2
        for device in range(n):  # every device reaches the root, in few steps
            seen = 0
            while device != root:
                device, seen = parents[device], seen + 1
            assert seen <= up(n)
        inner.append(set(parents.values()))
    assert inner[0] & inner[1] <= ({0} if n % 2 else set())

    b = 4 * n
    found = traffic("all_reduce", "double_tree", n, b)
    assert found.total_bytes == 2 * (n - 1) * b == traffic("all_reduce", "lax", n, b).total_bytes
    assert found.messages == 4 * (n - 1)
    assert 2 * (n - 1) / n * b <= found.device_bytes <= 2 * b
    assert found.steps <= 2 * up(n)


def test_double_trees_win_over_rings_by_latency_and_recursive_by_bytes():
    n = 512
    h = traffic("all_reduce", "double_tree", n, 4).steps
    for b in (2**22, 2**26, 2**30):
        closed = (math.sqrt((h - 1) * A) + math.sqrt(2 * b / B)) ** 2
        found = cost("all_reduce", "double_tree", n, b, SWITCH).time_us
        assert closed <= found <= closed * 1.01  # the number of pieces is whole
    ranks = [
        [each.algorithm for each in best("all_reduce", n, b, SWITCH)].index("double_tree")
        for b in (4, 2**24, 2**36)
    ]
    assert ranks[1] == 0 < min(ranks[0], ranks[2])


def test_hierarchical_sends_the_slow_level_a_node_s_part():
    fast, slow, slowest = LINKS["nvlink4"], LINKS["infiniband_ndr"], LINKS["dcn"]
    b = 4 * 8 * 4 * 6 * 100
    node, rack = hierarchical([(8, fast), (4, slow)], b)
    assert node.device_bytes == 2 * 7 / 8 * b
    assert rack.device_bytes == 2 * 3 / 4 * b / 8
    assert rack.group_bytes == 2 * 3 / 4 * b
    inside = cost("all_gather", "ring_2", 8, b, fast).time_us
    assert node.time_us == pytest.approx(2 * inside)
    assert rack.time_us == cost("all_reduce", "ring_2", 4, b // 8, slow).time_us

    node, rack, site = hierarchical([(8, fast), (4, slow), (6, slowest)], b)
    assert [each.group_bytes for each in (node, rack, site)] == [
        2 * 7 / 8 * b, 2 * 3 / 4 * b, 2 * 5 / 6 * b
    ]  # fmt: skip
    assert site.device_bytes == pytest.approx(2 * 5 / 6 * b / 32)
    # Together as many bytes as one ring of all devices: the fewest there can be.
    flat = traffic("all_reduce", "ring_2", 8 * 4 * 6, b).device_bytes
    assert sum(each.device_bytes for each in (node, rack, site)) == pytest.approx(flat)
    (only,) = hierarchical([(8, fast)], b)
    assert only.time_us == cost("all_reduce", "ring_2", 8, b, fast).time_us
    padded = hierarchical([(8, fast), (4, slow)], b - 4)
    assert padded == hierarchical([(8, fast), (4, slow)], b)


def test_hierarchical_sums_in_the_dtype_it_is_given():
    link, b = LINKS["nvlink4"], 2 * 8 * 4
    node, rack = hierarchical([(8, link), (4, link)], b, "lax", "bfloat16")
    assert node.device_bytes == 7 / 8 * 2 * b
    assert rack.device_bytes == 2 * 3 / 4 * b / 8


def test_a_link_without_latency_waits_for_the_bytes_only():
    free = Link("a switch in theory", 10, 0, 1, "made up")
    for n, b in itertools.product((1, 2, 8), (0, 2**20 * 8)):
        times = {each.algorithm: each.time_us for each in best("all_reduce", n, b, free)}
        sent = traffic("all_reduce", "double_tree", n, b).device_bytes
        assert times["double_tree"] == sent / (10 * 1e3)
        nearly = Link("a switch", 10, 1e-9, 1, "made up")
        limit = cost("all_reduce", "double_tree", n, b, nearly).time_us
        assert limit == pytest.approx(times["double_tree"], rel=1e-3, abs=1e-6)


def test_compressed_all_reduce_sends_both_payloads_less_its_own_part():
    found = compressed_all_reduce(8, 8 * 33, 8 * 65, SWITCH)
    assert found.traffic.device_bytes == 7 * (33 + 65)
    assert found.traffic.total_bytes == 8 * 7 * (33 + 65)
    assert found.time_us == pytest.approx(2 * 4 * A + 7 * (33 + 65) / B)
    # int8 with an fp32 scale to 256 elements, against a ring of fp32
    size = 8 * 256 * 10
    ratio = compressed_all_reduce(8, size + size // 64, size + size // 64, SWITCH)
    dense = traffic("all_reduce", "ring_2", 8, 4 * size)
    assert ratio.traffic.device_bytes / dense.device_bytes == pytest.approx((1 + 1 / 64) / 4)


REFUSED = [
    (("all_reduce", "ring_2", 0, 8), "n=0 devices"),
    (("all_reduce", "ring_2", 2, -8), "buffer_bytes=-8 is negative"),
    (("all_reduce", "rings", 2, 8), "lax, ring_1, .*double_tree.*did you mean 'ring_2'"),
    (("allreduce", "ring_2", 2, 8), "all_gather, .*did you mean 'all_reduce'"),
    (("all_reduce", "ring_2", 2, 8, "fp32"), "dtype 'fp32'"),
    (("all_reduce", "ring_2", 2, 7), "no float32 elements; pad to 8"),
    (("all_gather", "ring_2", 3, 16), "split over n=3 devices; pad to 24"),
    (("broadcast", "double_tree", 2, 8), "all_reduce only; use recursive"),
    (("all_reduce", "zzz", 2, 8), r"'zzz' is none of lax, ring_1, [a-z0-9_, ]*$"),
    (("al", "x", -1, -1), r"4 problems(.|\n)*'al'(.|\n)*'x'(.|\n)*n=-1(.|\n)*-1 is negative"),
]


@pytest.mark.parametrize(("arguments", "said"), REFUSED)
def test_nonsense_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        traffic(*arguments)


def test_what_a_link_or_a_function_cannot_do_is_refused():
    with pytest.raises(ValueError, match="a 2-D torus is a torus; use ring_2"):
        cost("all_reduce", "double_tree", 4, 16, TORUS)
    with pytest.raises(ValueError, match="'double_tree' is none of lax"):
        schedule("all_reduce", "double_tree", 4, 16)
    for levels in ([], [(0, SWITCH), (2, SWITCH)]):
        with pytest.raises(ValueError, match="levels of"):
            hierarchical(levels, 16)
    with pytest.raises(ValueError, match="split over n=8 devices; pad to 16"):
        compressed_all_reduce(8, 16, 15, SWITCH)
