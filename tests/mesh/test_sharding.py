"""Tables, presets and their products against PartitionSpecs written by hand, and every message."""

from __future__ import annotations

import copy
import pickle
from functools import reduce

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxtrain.mesh.axes import LOGICAL_AXES, MESH_AXES
from jaxtrain.mesh.sharding import (
    PaddedAxis,
    ShardingRules,
    activation_dims,
    data_parallel,
    dims,
    fsdp,
    partition_spec,
    place,
    table,
    tensor,
    ways,
    zero1,
    zero2,
)

SIZES = {"data": 2, "fsdp": 4, "tensor": 2}
LEAVES = {  # path -> (shape, logical axes)
    "up": ((8, 16), ("embed", "mlp")),
    "down": ((16, 8), ("mlp", "embed")),
    "query": ((3, 8, 8), ("layers", "embed", "heads")),
    "head": ((32, 8), ("vocab", "embed")),
    "norm": ((8,), ("embed",)),
    "bias": ((16,), ("mlp",)),
    "stacked_norm": ((3, 8), ("layers", "embed")),
    "positions": ((7, 8), ("seq", "embed")),
}
AXES = {path: axes for path, (_, axes) in LEAVES.items()}


def shapes(leaves=LEAVES):
    return {k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, (shape, _) in leaves.items()}


WHOLE = dict.fromkeys(LEAVES, P())
FSDP = WHOLE | {
    "up": P("fsdp", None),
    "down": P(None, "fsdp"),
    "query": P(None, "fsdp", None),
    "head": P(None, "fsdp"),
    "positions": P(None, "fsdp"),
}
TENSOR = WHOLE | {
    "up": P(None, "tensor"),
    "down": P("tensor", None),
    "query": P(None, None, "tensor"),
    "head": P("tensor", None),
    "bias": P("tensor"),
}
BOTH = TENSOR | {
    "up": P("fsdp", "tensor"),
    "down": P("tensor", "fsdp"),
    "query": P(None, "fsdp", "tensor"),
    "head": P("tensor", "fsdp"),
    "positions": P(None, "fsdp"),
}
ZERO = {k: P(*((("fsdp", "data") if a == "fsdp" else a) for a in spec)) for k, spec in FSDP.items()}
ZERO_TENSOR = {
    k: P(*((("fsdp", "data") if a == "fsdp" else a) for a in spec)) for k, spec in BOTH.items()
}

PRESETS = [
    # rules, parameters at rest, optimizer state, parameters in use, accumulate_sharded
    (data_parallel(), WHOLE, WHOLE, WHOLE, True),
    (fsdp(), FSDP, FSDP, WHOLE, True),
    (tensor(), TENSOR, TENSOR, TENSOR, True),
    (fsdp() | tensor(), BOTH, BOTH, TENSOR, True),
    (tensor() | fsdp(), BOTH, BOTH, TENSOR, True),
    (data_parallel() | fsdp() | tensor(), BOTH, BOTH, TENSOR, True),
    (zero1(), WHOLE, ZERO, WHOLE, False),
    (zero2(), WHOLE, ZERO, WHOLE, True),
    (zero1() | tensor(), TENSOR, ZERO_TENSOR, TENSOR, False),
    (tensor() | zero2(), TENSOR, ZERO_TENSOR, TENSOR, True),
]


def same(found, wanted, rank):
    """Equal up to trailing Nones, which a PartitionSpec may leave out."""
    pad = (None,) * rank
    return (tuple(found) + pad)[:rank] == (tuple(wanted) + pad)[:rank]


@pytest.mark.parametrize(("rules", "rest", "optimizer", "use", "sharded"), PRESETS)
def test_presets_place_leaves_as_written_by_hand(rules, rest, optimizer, use, sharded):
    placed, violations = place(shapes(), AXES, rules, sizes=SIZES)
    assert violations == []
    assert rules.accumulate_sharded is sharded
    for path, (shape, axes) in LEAVES.items():
        leaf, rank = placed[path], len(shape)
        assert (leaf.path, leaf.shape, leaf.axes, leaf.dtype) == (path, shape, axes, "float32")
        for split, wanted in ((leaf.params, rest), (leaf.optimizer, optimizer), (leaf.in_use, use)):
            assert same(partition_spec(split), wanted[path], rank), (path, split, wanted[path])


@pytest.mark.parametrize(("rules", "rest"), [(row[0], row[1]) for row in PRESETS])
def test_local_size_is_what_a_device_holds(rules, rest):
    placed, _ = place(shapes(), AXES, rules, sizes=SIZES)
    auto = (jax.sharding.AxisType.Auto,) * 3
    mesh = jax.sharding.AbstractMesh((2, 4, 2), ("data", "fsdp", "tensor"), auto)
    for path, (shape, _) in LEAVES.items():
        local = jax.sharding.NamedSharding(mesh, rest[path]).shard_shape(shape)
        assert placed[path].local_size(SIZES) == reduce(int.__mul__, local, 1), path


STAGES = {"data": 2, "fsdp": 4, "stage": 3, "tensor": 2}


def staged(spec: P, axes: tuple[str, ...]) -> P:
    """What a spec of no pipeline becomes in one: stacked leaves are split by layer, all others over
    stages within tensor, or where tensor would be."""
    rank = len(axes)
    dims = [
        (d,) if isinstance(d, str) else (d or ()) for d in (tuple(spec) + (None,) * rank)[:rank]
    ]
    for n, name in enumerate(axes):
        if "layers" in axes:
            dims[n] = ("stage",) if name == "layers" else dims[n]
        elif name in ("heads", "kv_heads", "mlp", "vocab"):
            held = dims[n][:1] if dims[n][:1] == ("tensor",) else ()
            dims[n] = (*held, "stage", *dims[n][len(held) :])
    return P(*dims)


@pytest.mark.parametrize(("rules", "rest", "optimizer", "use", "sharded"), PRESETS)
def test_presets_on_a_pipeline(rules, rest, optimizer, use, sharded):
    leaves = {path: (tuple(12 * n for n in shape), axes) for path, (shape, axes) in LEAVES.items()}
    placed, violations = place(shapes(leaves), AXES, rules, sizes=STAGES)
    assert violations == []
    for path, (shape, axes) in leaves.items():
        leaf = placed[path]
        for split, wanted in ((leaf.params, rest), (leaf.optimizer, optimizer), (leaf.in_use, use)):
            found, due = partition_spec(split), staged(wanted[path], axes)
            assert same(found, P(*(d or None for d in map(one_or_many, due))), len(shape)), path


def one_or_many(dim):
    """As a PartitionSpec has it: a name where there is one."""
    return dim[0] if isinstance(dim, tuple) and len(dim) == 1 else dim


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("vocab", "embed"), P(("tensor", "stage"), "fsdp")),
        (("embed", "kv_heads"), P("fsdp", ("tensor", "stage"))),
        (("mlp",), P(("tensor", "stage"))),
        (("embed",), P(None)),
        (("layers", "embed", "mlp"), P("stage", "fsdp", "tensor")),
        (("layers", "mlp"), P("stage", "tensor")),
        (("chunks", "layers", "embed", "heads"), P(None, "stage", "fsdp", "tensor")),
        (("chunks", "layers", "embed"), P(None, "stage", None)),
        (("experts", "layers", "embed", "mlp"), P(None, "stage", "fsdp", "tensor")),
    ],
)
def test_where_a_parameter_rests_on_a_pipeline(axes, spec):
    mine = (fsdp() | tensor()).of(axes, STAGES)
    assert same(partition_spec(dims(axes, mine.params, sizes=STAGES)), spec, len(axes))


def test_rules_without_a_pipeline_are_the_same():
    rules = fsdp() | tensor()
    for sizes in ({}, {"stage": 1}, SIZES):
        assert rules.of(("vocab", "embed"), sizes) is rules


def test_a_pipeline_keeps_what_rests_and_is_used_in_step():
    """Split in use over the beginning of what it rests over, and that over its optimizer's."""
    rules = ShardingRules(
        params=table({"mlp": ("tensor", "fsdp")}),
        optimizer=table({"mlp": ("tensor", "fsdp", "data")}),
        activations=table({"mlp": "tensor"}),
    )
    axes = ("embed", "mlp")
    mine = rules.of(axes, STAGES)
    assert dims(axes, mine.params, sizes=STAGES)[1] == ("tensor", "stage", "fsdp")
    assert dims(axes, mine.optimizer_table, sizes=STAGES)[1] == ("tensor", "stage", "fsdp", "data")
    assert dims(axes, mine.activations, sizes=STAGES)[1] == ("tensor", "stage")


@pytest.mark.parametrize("sizes", [{}, {"fsdp": 1, "tensor": 1}, {"replica": 4}])
def test_axes_of_size_one_and_axes_absent_split_nothing(sizes):
    placed, violations = place(shapes(), AXES, zero1() | tensor(), sizes=sizes)
    assert violations == []
    for leaf in placed.values():
        assert not any((*leaf.params, *leaf.optimizer, *leaf.in_use))


@pytest.mark.parametrize(
    ("axes", "split"),
    [
        (("embed",), ((),)),
        (("layers", "embed"), ((), ())),
        (("experts", "layers", "embed"), ((), (), ())),
        (("embed", "head_dim"), (("fsdp",), ())),
        ((None, "embed"), ((), ("fsdp",))),
    ],
)
def test_small_leaves_stay_whole_over_batch_axes(axes, split):
    assert dims(axes, fsdp().params, sizes=SIZES) == split


def test_a_position_table_is_whole_in_use_where_tokens_are_split():
    """Every device looks up any position, whichever part of the sequence it has."""
    axes = {"positions": ("seq", "embed")}
    leaves = {"positions": jax.ShapeDtypeStruct((7, 8), jnp.float32)}
    placed, violations = place(leaves, axes, fsdp(), sizes={"fsdp": 2, "context": 2})
    assert not violations
    assert placed["positions"].params == ((), ("fsdp",))
    assert placed["positions"].in_use == ((), ())


def test_a_padded_axis_is_split_as_its_name_and_survives_a_copy():
    axis = PaddedAxis("vocab", 5)
    assert dims((axis, "embed"), tensor().params, sizes=SIZES) == (("tensor",), ())
    for copied in (copy.deepcopy(axis), pickle.loads(pickle.dumps(axis))):
        assert (copied, copied.real) == ("vocab", 5)


def test_small_leaves_are_split_over_other_axes():
    rules = table({"mlp": ("fsdp", "tensor")})
    assert dims(("mlp",), rules, sizes=SIZES) == (("tensor",),)


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [
        (("batch", "seq", "embed"), (("data", "fsdp"), (), ())),
        (("batch*seq", "embed"), (("data", "fsdp"), ())),
        (("batch*seq", "mlp"), (("data", "fsdp"), ("tensor",))),
        (("batch",), (("data", "fsdp"),)),
        ((None, "heads"), ((), ("tensor",))),
    ],
)
def test_activations(axes, wanted):
    assert activation_dims(axes, tensor().activations, sizes=SIZES) == wanted


def test_merged_dims_are_split_by_both_names_major_first():
    sizes = {"data": 2, "context": 4}
    assert activation_dims(("batch*seq",), ShardingRules().activations, sizes=sizes) == (
        ("data", "context"),
    )


def test_ways_and_specs():
    assert ways((), SIZES) == 1 and ways(("data", "fsdp"), SIZES) == 8
    assert partition_spec(((), ("fsdp",), ("data", "tensor"))) == P(
        None, "fsdp", ("data", "tensor")
    )


def test_whole_until_update_changes_the_reduction_only():
    rules = fsdp() | tensor()
    once = rules.whole_until_update()
    assert not once.accumulate_sharded
    assert (once.params, once.optimizer, once.activations) == (
        rules.params,
        rules.optimizer,
        rules.activations,
    )
    assert (fsdp() | once).accumulate_sharded is False


def test_the_two_vocabularies_share_no_word():
    assert not set(MESH_AXES) & set(LOGICAL_AXES)


# Messages: the rule, the value, the remedy.


def test_unknown_mesh_axis():
    with pytest.raises(
        ValueError, match=r"rule embed -> \('fdsp',\): 'fdsp' is not a mesh axis; .*fsdp"
    ):
        table({"embed": "fdsp"})


@pytest.mark.parametrize(
    ("axis", "hint"),
    [
        ("embeded", "did you mean 'embed'"),
        ("kv_head", "did you mean 'kv_heads'"),
        ("vocabulary", "did you mean 'vocab'"),
        ("qqqq", "add a rule for it or use None"),
    ],
)
def test_unknown_logical_axis_with_the_nearest(axis, hint):
    with pytest.raises(ValueError, match=f"w has logical axes .*{axis!r} is unknown; {hint}"):
        dims(("mlp", axis), fsdp().params, sizes=SIZES, what="w")


def test_a_users_own_logical_axis_needs_a_rule_and_no_more():
    rules = table({"freckles": "tensor"})
    assert dims(("freckles", None), rules, sizes=SIZES) == (("tensor",), ())


def test_a_mesh_axis_used_twice_shows_both_sides():
    rules = table({"embed": "tensor", "mlp": ("fsdp", "tensor")})
    with pytest.raises(ValueError) as caught:
        dims(("embed", "mlp"), rules, sizes=SIZES, what="up")
    said = str(caught.value)
    assert "up has logical axes ('embed', 'mlp')" in said
    assert "(('tensor',), ('fsdp', 'tensor'))" in said
    assert "mesh axis 'tensor' is used twice; split one of the dims over another" in said
    # Not a fault on a mesh where that axis has size 1.
    assert dims(("embed", "mlp"), rules, sizes={"fsdp": 4}) == ((), ("fsdp",))


def test_presets_that_split_one_axis_differently():
    mine = ShardingRules(params=table({"embed": "tensor"}))
    with pytest.raises(ValueError) as caught:
        mine | fsdp()
    said = str(caught.value)
    assert "'embed': over ('tensor',) and over ('fsdp', 'expert')" in said
    assert "write one table with the axes in the order you want" in said
    with pytest.raises(ValueError, match=r"'embed': over .*expert.* and over .*data"):
        fsdp() | zero1()


def violations_of(leaves, rules, sizes=SIZES):
    return place(shapes(leaves), {k: axes for k, (_, axes) in leaves.items()}, rules, sizes=sizes)[
        1
    ]


@pytest.mark.parametrize(
    ("leaves", "rules", "said"),
    [
        (
            {"w": ((6, 5), ("embed", "mlp"))},
            fsdp(),
            "embed=6 does not split over fsdp=4 (w); use embed=4 or 8, or fsdp=2",
        ),
        (
            {"w": ((4, 7), ("embed", "mlp"))},
            tensor(),
            "mlp=7 does not split over tensor=2 (w); use mlp=6 or 8, or tensor=1",
        ),
        (
            {"w": ((2, 1), ("embed", "mlp"))},
            tensor(),
            "mlp=1 does not split over tensor=2 (w); use mlp=2, or tensor=1",
        ),
        (
            {"w": ((12, 2), ("embed", "mlp"))},
            zero2(),
            "embed=12 does not split over fsdp=4 x data=2 (optimizer state of w); use embed=8 or "
            "16, or data=1",
        ),
        (
            {"w": ((8,), ("embed", "mlp"))},
            fsdp(),
            "w has shape (8,) and 2 logical axes ('embed', 'mlp'); name one axis for each dim",
        ),
        (
            {"w": ((8, 8), ("embed", "mlp"))},
            ShardingRules(params=table({"embed": "fsdp"}), activations=table({"embed": "tensor"})),
            "w: embed rests split over ('fsdp',) and is used split over ('tensor',); a tensor is "
            "gathered for use, so the second must be the beginning of the first",
        ),
        (
            {"w": ((8, 8), ("embed", "mlp"))},
            ShardingRules(params=table({"embed": "fsdp"}), optimizer=table({"embed": "data"})),
            "w: embed rests split over ('fsdp',) and its optimizer state over ('data',); the first "
            "must be the beginning of the second",
        ),
    ],
)
def test_each_violation_is_said_once(leaves, rules, said):
    assert violations_of(leaves, rules) == [said]


def test_all_violations_at_once_and_the_good_leaves_are_placed():
    leaves = {
        "good": ((8, 16), ("embed", "mlp")),
        "odd": ((6, 7), ("embed", "mlp")),
        "spelled": ((8, 8), ("embd", "mlp")),
        "short": ((8, 8), ("embed",)),
    }
    axes = {k: names for k, (_, names) in leaves.items()}
    placed, found = place(shapes(leaves), axes, fsdp() | tensor(), sizes=SIZES)
    assert set(placed) == {"good", "odd"}
    starts = ["spelled has logical axes", "short has shape", "embed=6", "mlp=7"]
    assert [next(f for f in found if f.startswith(s)) for s in starts] == found
