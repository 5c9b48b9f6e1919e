"""A remedy that a message names, taken alone, mends what it is of; and a cause is told once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

import jaxtrain
from jaxtrain.context import Ulysses
from jaxtrain.data import BigramChain
from jaxtrain.mesh.axes import MESH_AXES
from jaxtrain.mesh.mesh import MeshSpec, load_mesh
from jaxtrain.remedies import Clash, Near, settled
from jaxtrain.step.assembly import try_assemble
from jaxtrain.transformer.mixture import MoeConfig

BLOCK = jaxtrain.BlockConfig(
    jaxtrain.AttentionConfig(heads=4, kv_heads=None), jaxtrain.MlpConfig(hidden=64)
)
PARTS = ("period", "prefix", "suffix")


def experiment(
    attention: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    *,
    mlp: Any = BLOCK.mlp,
    **changes: Any,
) -> jaxtrain.Experiment:
    block = replace(BLOCK, attention=replace(BLOCK.attention, **attention or {}), mlp=mlp)
    sizes: dict[str, Any] = dict(
        vocab=64, embed=64, layers=2, period=(block,), vocab_multiple=16, tied=True
    )
    decoder = jaxtrain.DecoderConfig(**sizes | (model or {}))
    fields: dict[str, Any] = dict(
        model=decoder,
        data=BigramChain(vocab=64, seq=16),
        optimizer=jaxtrain.AdamW(1e-3),
        steps=10,
        batch=16,
        sharding=jaxtrain.fsdp() | jaxtrain.tensor(),
        evaluation=None,
        checkpoints=None,
    )
    return jaxtrain.Experiment(**fields | changes)


def violations_of(given: jaxtrain.Experiment, axes: dict[str, int] | MeshSpec) -> list[str]:
    spec = axes if isinstance(axes, MeshSpec) else jaxtrain.mesh_from_axes(**axes)
    return try_assemble(given, spec)[1]


def rules(given: jaxtrain.Experiment, axes: dict[str, int]) -> list[str]:
    """Violations without their remedies."""
    return [line.partition("; ")[0] for line in violations_of(given, axes)]


def remedies(line: str) -> Iterator[dict[str, int]]:
    """What a line says to use, one after another."""
    _, _, use = line.rpartition("; use ")
    for remedy in use.split(", or "):
        if found := re.findall(r"(\w+)=(\d+(?: or \d+)*)(?= with |$)", remedy):
            if " with " in remedy:
                yield {name: int(value) for name, value in found}
            else:
                ((name, values),) = found
                yield from ({name: int(value)} for value in values.split(" or "))


def taken(
    given: jaxtrain.Experiment, axes: dict[str, int], rule: str, new: dict[str, int]
) -> tuple[jaxtrain.Experiment, dict[str, int]]:
    """The experiment and the mesh with a remedy, in blocks wherever they have the rule's sizes."""
    old = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", rule)}

    def changed(part: Any) -> Any:
        own = {name: value for name, value in new.items() if hasattr(part, name)}
        for name in ("heads", "kv_heads", "hidden", "experts"):
            if name in old and getattr(part, name, None) not in (None, old[name]):
                return part
        return replace(part, **own)

    def blocks(every: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            replace(block, attention=changed(block.attention), mlp=changed(block.mlp))
            for block in every
        )

    model = replace(given.model, **{part: blocks(getattr(given.model, part)) for part in PARTS})
    model = replace(model, **{name: n for name, n in new.items() if hasattr(model, name)})
    own = {name: n for name, n in new.items() if name in ("batch", "microbatches")}
    data = replace(given.data, seq=new.get("seq", given.data.seq))
    of_mesh = {name: n for name, n in new.items() if name in MESH_AXES}
    return replace(given, model=model, data=data, **own), axes | of_mesh


def taken_in_vain(given: jaxtrain.Experiment, axes: dict[str, int]) -> list[str]:
    """Remedies after which their cause, or another one of the same sizes, is left."""
    failed, count = [], 0
    for line in violations_of(given, axes):
        rule = line.partition("; ")[0]
        for new in remedies(line):
            count += 1
            after = [
                each.partition("; ")[0] for each in violations_of(*taken(given, axes, rule, new))
            ]
            of_same = "|".join(rf"(?<!\w){name}={value}(?!\d)" for name, value in new.items())
            left = [other for other in after if other == rule or re.search(of_same, other)]
            failed += [f"{line}\n  {new} leaves: {other}" for other in left]
    assert count, "no remedy was named"
    return failed


MIXED = (BLOCK, replace(BLOCK, attention=replace(BLOCK.attention, heads=6, head_dim=8)))
CASES: dict[str, tuple[jaxtrain.Experiment, dict[str, int]]] = {
    "embed over heads and fsdp": (experiment({"heads": 5}, {"embed": 66}), {"fsdp": 8}),
    "embed of two kinds of blocks": (
        experiment(model=dict(embed=66, period=MIXED)),
        {"fsdp": 4, "tensor": 2},
    ),
    "odd heads": (experiment({"heads": 6}, {"embed": 66}), {"fsdp": 2, "tensor": 3}),
    "an odd head_dim": (experiment({"head_dim": 5}), {"tensor": 4}),
    "heads over tensor, embed and kv_heads": (
        experiment({"heads": 6, "kv_heads": 3}, {"embed": 96}),
        {"tensor": 4},
    ),
    "kv_heads over heads and tensor": (experiment({"kv_heads": 3}), {"tensor": 4}),
    "hidden, vocabulary and embed": (
        experiment(model=dict(embed=72, vocab=66, vocab_multiple=1), mlp=jaxtrain.MlpConfig(70)),
        {"fsdp": 16, "tensor": 4},
    ),
    "experts": (experiment(mlp=MoeConfig(hidden=64, experts=6)), {"expert": 4}),
    "a vocabulary with fewer rows than ids": (
        experiment(model=dict(vocab=50, vocab_multiple=1)),
        {"tensor": 4},
    ),
    "microbatches": (experiment(batch=12, microbatches=5), {"data": 4, "fsdp": 2}),
    "rows": (experiment(batch=12, microbatches=2), {"data": 4, "fsdp": 2}),
    "tokens": (experiment(batch=1, data=BigramChain(64, seq=7)), {"tensor": 2}),
    "a cut row": (experiment(data=BigramChain(64, seq=20)), {"context": 8, "tensor": 2}),
    "traded heads": (
        experiment(execution=jaxtrain.Execution(context=Ulysses())),
        {"context": 4, "tensor": 2},
    ),
    "more tokens than positions": (experiment(model={"learned_positions": 9}), {"tensor": 4}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_remedy_alone_mends_its_cause(name: str) -> None:
    failed = taken_in_vain(*CASES[name])
    assert not failed, "\n".join(failed)


def test_a_mesh_file_keeps_its_devices(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('chip = "cpu"\ndevices = 4\n[axes]\ntensor = 4\n', encoding="utf-8")
    spec, given = load_mesh(path), experiment({"heads": 6, "head_dim": 8})
    (line,) = violations_of(given, spec)
    assert line.endswith("use heads=4 or 8, or tensor=2 with data=2")
    assert violations_of(given, spec.with_axes({"tensor": 2, "data": 2})) == []


def test_leaves_that_do_not_split_alike_are_one_line() -> None:
    given = experiment(model=dict(embed=66, layers=4), attention=dict(head_dim=8))
    (line,) = violations_of(given, {"fsdp": 4})
    assert re.fullmatch(
        r"embed=66 does not split over fsdp=4 \(embedding, period\.0\S+ and \d+ more\); use "
        r"embed=64 or 68, or fsdp=2",
        line,
    )


def test_a_cause_in_many_blocks_is_one_line() -> None:
    odd = [replace(BLOCK, dropout=share / 10) for share in range(5)]
    model = experiment(model=dict(embed=66, period=tuple(odd), layers=5)).model
    (line,) = model.violations()
    assert line.startswith("blocks 0, 1 and 3 more: embed=66 is not a multiple of heads=4; use")
    (line,) = replace(model, period=tuple(odd[:2]), layers=2).violations()
    assert line.startswith("blocks 0 and 1: embed=66")


def test_a_head_dim_that_nobody_wrote_is_told_as_what_it_comes_from() -> None:
    (line,) = experiment({"heads": 6}, {"embed": 66}).model.violations()
    rule = line.partition("; ")[0]
    assert "embed=66 // heads=6 = 11 dims" in rule and "head_dim=" not in rule
    (line,) = experiment({"heads": 6, "head_dim": 11}).model.violations()
    assert "of head_dim=11 it" in line and line.endswith("; use head_dim=10 or 12")


def test_kv_heads_that_nobody_wrote_are_not_violations_of() -> None:
    given = experiment({"heads": 6, "head_dim": 8})
    (line,) = violations_of(given, {"tensor": 4})
    assert line == "heads=6 does not split over tensor=4; use heads=4 or 8, or tensor=2"
    both = violations_of(experiment({"heads": 6, "head_dim": 8, "kv_heads": 6}), {"tensor": 4})
    assert [line.partition("=")[0] for line in both] == ["heads", "kv_heads"]


def test_where_no_size_alone_fits_two_are_named_together() -> None:
    given = experiment({"heads": 6, "kv_heads": 6, "head_dim": 8})
    line = violations_of(given, {"tensor": 4})[1]
    none = "no near value of kv_heads alone satisfies every rule; use kv_heads=8 with heads=8"
    assert line.endswith(f"; {none}, or tensor=2")


def test_a_value_that_fits_far_from_the_old_one_is_still_named() -> None:
    """The next multiple of 31 heads that 512 devices split is 340 multiples away."""
    (line,) = violations_of(experiment({"heads": 31}, {"embed": 4096}, batch=512), {"fsdp": 512})
    assert "; use embed=15872, or head_dim=132 or 134, or heads=" in line


def test_a_change_that_leaves_the_rule_as_it_was_is_no_remedy() -> None:
    clash = Clash("b is odd", "use a=1", sizes={"a": 3}, ways=[(Near("a", 3),)], also="b=2")
    (line,) = settled(
        [clash], {"a": 3}, change=lambda old, _, new: old | new, violations_of=lambda _: [clash]
    )
    assert line == "b is odd; no near value of a alone satisfies every rule; use b=2"


@dataclass(frozen=True)
class Asserting(jaxtrain.DecoderConfig):
    """A configuration of a user's own that is not polite about what it takes."""

    def __post_init__(self) -> None:
        assert self.embed % 10 == 0, "embed must be a multiple of 10"


def test_a_configuration_that_asserts_hides_no_refusal() -> None:
    """Its own word is that a remedy does not mend it."""
    given = experiment({"heads": 5})
    tried = replace(given, model=Asserting(**{**vars(given.model), "embed": 30}))
    assert any(
        "embed=30 does not split over fsdp=4" in v for v in violations_of(tried, {"fsdp": 4})
    )
