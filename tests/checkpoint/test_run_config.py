"""config.json: written whole or not at all, and a run directory refuses another experiment."""

from __future__ import annotations

import json
import os

import pytest

from jaxtrain.checkpoint import (
    ABSENT,
    compare_config,
    read_config,
    refuse_other_experiment,
    write_config,
)

CONFIG = {
    "steps": 100,
    "model": {
        "layers": 2,
        "blocks": [{"kind": "attention"}, {"kind": "mlp"}],
        "act": "jax.nn:silu",
    },
    "optimizer": {"learning_rate": {"peak": 0.003}, "clip": None, "masks": []},
}


def changed(path: str, value):
    """CONFIG with the field at the dotted path set, or removed for ABSENT."""
    config = json.loads(json.dumps(CONFIG))
    *parents, last = path.split(".")
    node = config
    for key in parents:
        node = node[int(key)] if isinstance(node, list) else node[key]
    if value is ABSENT:
        del node[last]
    else:
        node[last] = value
    return config


def test_what_is_written_is_read_back(tmp_path):
    path = write_config(tmp_path / "runs" / "one", CONFIG)
    assert path == tmp_path / "runs" / "one" / "config.json"
    assert read_config(path.parent) == CONFIG
    assert path.stat().st_mode & 0o777 == 0o644, "others may read a run that is shared"
    assert [entry.name for entry in path.parent.iterdir()] == ["config.json"]
    assert compare_config(path.parent, CONFIG) == []
    refuse_other_experiment(path.parent, CONFIG)


def test_a_directory_without_a_run_differs_in_nothing(tmp_path):
    assert read_config(tmp_path) is None
    assert compare_config(tmp_path / "not there", CONFIG) == []


@pytest.mark.parametrize(
    ("now", "differences"),
    [
        (changed("optimizer.learning_rate.peak", 1.0),
         [("optimizer.learning_rate.peak", 0.003, 1.0)]),
        (changed("model.blocks.1.kind", "moe"), [("model.blocks.1.kind", "mlp", "moe")]),
        (changed("model.act", ABSENT), [("model.act", "jax.nn:silu", ABSENT)]),
        (changed("model.window", 4), [("model.window", ABSENT, 4)]),
        (changed("optimizer.clip", 1.0), [("optimizer.clip", None, 1.0)]),
        (changed("optimizer.masks", ["b"]),
         [("optimizer.masks", [], ABSENT), ("optimizer.masks.0", ABSENT, "b")]),
        (changed("model.blocks", [{"kind": "attention"}]),
         [("model.blocks.1.kind", "mlp", ABSENT)]),
        (changed("steps", 7), []),
        (changed("optimizer.masks", ()), []),
        (changed("model.layers", 2.0), []),
    ],
    ids=["value", "in a list", "removed", "added", "from None", "from empty", "shorter", "ignored",
         "tuple", "float"],
)  # fmt: skip
def test_each_field_that_differs_is_found(tmp_path, now, differences):
    write_config(tmp_path, CONFIG)
    assert compare_config(tmp_path, now) == differences


def test_ignoring_a_field_ignores_what_is_below_it_and_nothing_beside_it(tmp_path):
    write_config(tmp_path, CONFIG | {"steps_per_epoch": 3})
    now = changed("optimizer.learning_rate.peak", 1.0) | {"steps_per_epoch": 4, "steps": 1}
    found = compare_config(tmp_path, now, ignore=("steps", "optimizer"))
    assert [difference.path for difference in found] == ["steps_per_epoch"]


def test_not_a_number_equals_itself(tmp_path):
    write_config(tmp_path, {"a": float("nan")})
    assert compare_config(tmp_path, {"a": float("nan")}) == []


def test_what_was_stored_is_completed_before_it_is_compared(tmp_path):
    write_config(tmp_path, {"a": 1, "old": 3})
    given = dict(completed=lambda stored: {"a": stored["a"], "moved": stored["old"]})
    assert compare_config(tmp_path, {"a": 1, "moved": 3}, **given) == []
    assert compare_config(tmp_path, {"a": 1, "moved": 4}, **given) == [("moved", 3, 4)]


def test_a_field_is_left_out_with_all_below_it_alone(tmp_path):
    """`*` is any one name; what lies above a field that is left out still counts."""
    stored = {"a": {"b": 1, "c": [[0, {"d": 2}], [0, {"d": 3}]]}, "e": None}
    write_config(tmp_path, stored)
    now = {"a": {"b": {"x": 9}, "c": [[0, {"d": 4}], [1, {"d": 3}]]}, "e": {"f": 1}}
    found = [d.path for d in compare_config(tmp_path, now, ignore=())]
    assert found == ["a.b", "a.b.x", "a.c.0.1.d", "a.c.1.0", "e", "e.f"]
    ignore = ("a.b", "a.c.*.1.d", "e.f")
    assert [d.path for d in compare_config(tmp_path, now, ignore=ignore)] == ["a.c.1.0", "e"]
    assert [d.path for d in compare_config(tmp_path, now, ignore=("*.b",))] == found[2:]


def test_another_experiment_is_refused_with_all_the_fields(tmp_path):
    write_config(tmp_path, CONFIG)
    now = changed("optimizer.learning_rate.peak", 0.001) | {"seed": 1, "steps": 5}
    with pytest.raises(ValueError) as error:
        refuse_other_experiment(tmp_path, now)
    assert str(error.value) == (
        f"run directory {tmp_path} holds another experiment: optimizer.learning_rate.peak was "
        "0.003, now 0.001; seed was absent, now 1; set them back, or begin anew by --fresh "
        "(fresh=True), which keeps this run beside it, or in another --run-dir"
    )


@pytest.mark.parametrize("text", ["", '{"steps": 1', "[1]", "\udcff"])
def test_a_damaged_config_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"config\.json .*--run-dir"):
        compare_config(tmp_path, CONFIG)


def test_checkpoints_without_a_config_are_nobodys(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    assert read_config(tmp_path) is None
    (tmp_path / "checkpoints" / "12" / "metadata").mkdir(parents=True)
    (tmp_path / "checkpoints" / "12" / "metadata" / "metadata").write_text("{}")
    with pytest.raises(ValueError, match=r"step 12\) but no config\.json"):
        refuse_other_experiment(tmp_path, CONFIG)


def test_a_config_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    write_config(tmp_path, CONFIG)
    with pytest.raises(ValueError, match="not JSON"):
        write_config(tmp_path, {"x": {1, 2}})

    def fail(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ValueError, match=r"cannot be written: OSError.*No space left"):
        write_config(tmp_path, {"x": 1})
    assert read_config(tmp_path) == CONFIG
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]
