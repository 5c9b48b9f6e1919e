"""The communication contract: what a step was predicted to send against what its program sends.

The predicted side is `traffic.py`'s; the compiled side is read from the program's own text. What
compilers are known to rewrite is undone by name, here; any other difference breaks the contract.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxtrain.collectives.compressed import Compressed
from jaxtrain.collectives.hierarchical import Hierarchical
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.ring import Ring
from jaxtrain.experiment import Execution
from jaxtrain.nn.loss import chunk_count
from jaxtrain.planner.facts import LayerFacts, LeafFacts, StepFacts, SumFacts
from jaxtrain.planner.traffic import Sent, step_traffic
from jaxtrain.telemetry.hlo import SENT, Collective
from jaxtrain.telemetry.hlo_groups import Groups
from jaxtrain.train.assembly import Assembly, platform_of

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}


class Key(NamedTuple):
    """What collectives are told apart by."""

    kind: str
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Line:
    """One key of the contract: how often in a step, and the bytes each device sends. A variadic
    collective counts once for each of its arrays."""

    key: Key
    predicted: int
    predicted_bytes: float
    compiled: int
    compiled_bytes: float
    why: tuple[str, ...]

    @property
    def kept(self) -> bool:
        same = math.isclose(self.predicted_bytes, self.compiled_bytes, rel_tol=1e-12)
        return same and self.predicted == self.compiled


@dataclass(frozen=True)
class Contract:
    """Every key that either side has, and the rewrites that were undone."""

    lines: tuple[Line, ...]
    rewrites: tuple[str, ...]

    @property
    def broken(self) -> list[Line]:
        return [line for line in self.lines if not line.kept]


def unpredicted(assembly: Assembly) -> str | None:
    """Why an assembly's collectives are not predicted; None where they are."""
    if not assembly.explicit or not assembly.built_in:
        return (
            "only the explicit step of a built-in model states its collectives; under gspmd, and "
            "on one device, there is nothing to hold a program to"
        )
    reducer = assembly.experiment.execution.reducer
    if isinstance(reducer, Compressed):
        return f"what {reducer!r} sends is not predicted yet"
    return None


def contract(assembly: Assembly, compiled: Iterable[Collective]) -> Contract:
    """The contract of an explicit step. Raises ValueError where it is `unpredicted`."""
    if why := unpredicted(assembly):
        raise ValueError(why)
    sent, rewrites = rewritten(step_traffic(facts_of(assembly)), assembly)
    predicted = _totals(sent, assembly.sizes)
    found = seen(compiled, assembly.sizes)
    lines = []
    for key in sorted({**predicted, **found}):
        count, size = predicted.get(key, (0, 0.0))
        compiled_count, compiled_size = found.get(key, (0, 0.0))
        why = tuple(dict.fromkeys(s.why for s in sent if _key(s) == key))
        lines.append(Line(key, count, size, compiled_count, compiled_size, why))
    return Contract(tuple(lines), rewrites)


def rewritten(sent: list[Sent], assembly: Assembly) -> tuple[list[Sent], tuple[str, ...]]:
    """`sent` as the platform's compiler is known to change it, and those changes in words."""
    wide = [_widened(each) for each in sent]
    if platform_of(assembly.spec) != "cpu" or wide == sent:
        return sent, ()
    return wide, ("XLA:CPU sends 16-bit numbers as fp32",)


def _widened(sent: Sent) -> Sent:
    if sent.dtype not in ("bfloat16", "float16"):
        return sent
    return replace(sent, dtype="float32", buffer_bytes=2 * sent.buffer_bytes)


def _key(sent: Sent) -> Key:
    return Key(sent.kind, sent.axes, DTYPES[sent.dtype])


def _totals(sent: list[Sent], sizes: Mapping[str, int]) -> dict[Key, tuple[int, float]]:
    counts: Counter[Key] = Counter()
    nbytes: dict[Key, float] = {}
    for each in sent:
        key = _key(each)
        n = math.prod(sizes[a] for a in each.axes)
        counts[key] += each.count
        nbytes[key] = nbytes.get(key, 0.0) + each.count * each.buffer_bytes * SENT[each.kind](n)
    return {key: (counts[key], nbytes[key]) for key in counts}


def seen(compiled: Iterable[Collective], sizes: Mapping[str, int]) -> dict[Key, tuple[int, float]]:
    """Counts and bytes of a program's collectives by key; `sizes` are its mesh axes, in order."""
    found: dict[Key, tuple[int, float]] = {}
    for each in compiled:
        if each.group_size == 1:
            continue
        key = Key(each.kind, axes_of(each.groups, sizes), each.dtype)
        count, size = found.get(key, (0, 0.0))
        arrays = each.count * each.arrays
        found[key] = (count + arrays, size + each.total_wire_bytes)
    return found


def axes_of(groups: Groups, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The fewest mesh axes along which the groups lie: a permute may connect some devices only."""
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    names = tuple(sizes)
    for count in range(len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            rest = [i for i in range(len(names)) if i not in chosen]
            ways = math.prod(ids.shape[i] for i in chosen)
            row_of = np.empty(ids.size, int)
            row_of[ids.transpose([*rest, *chosen]).reshape(-1)] = np.arange(ids.size) // ways
            if all(len(set(row_of[list(group)])) == 1 for group in groups):
                return tuple(names[i] for i in chosen)
    raise AssertionError("all axes together hold every group")


def facts_of(assembly: Assembly) -> StepFacts:
    """What the prediction may know of an assembly of a decoder."""
    e, loop, model = assembly.experiment, assembly.loop, assembly.experiment.model
    rows, seq = assembly.abstract_batch()["tokens"].shape[1:]
    rows //= math.prod(assembly.sizes[a] for a in assembly.batch_splits["tokens"][1])
    leaves = {
        path: LeafFacts(
            *(place.shape, place.dtype, place.params, place.optimizer, place.in_use),
            stacked=place.axes[0] == "layers",
        )
        for path, place in assembly.places.items()
    }
    layers = LayerFacts(
        tables=tuple(name for name in ("embedding", "positions", "head") if name in leaves),
        outside=tuple(
            f"{part}.{i}."
            for part in ("prefix", "suffix")
            for i in range(len(getattr(model, part)))
        ),
        period=len(model.period),
        periods=model.periods,
        unroll=loop.unroll,
        remat=loop.remat != "none",
        prefetch=loop.prefetch,
        reshard=loop.reshard_after_forward,
    )
    return StepFacts(
        sizes=assembly.sizes,
        tensor=assembly.tensor,
        tokens=rows * seq,
        embed=model.embed,
        chunks=chunk_count(rows * seq, rows, model.chunk_tokens),
        microbatches=e.microbatches,
        leaves=leaves,
        layers=layers,
        compute=jnp.dtype(e.precision.compute).name,
        reduce=jnp.dtype(e.precision.reduce).name,
        sharded=e.sharding.accumulate_sharded,
        sums=_sum_facts(e.execution),
        fsdp_by=algorithm_name(assembly.collectives.fsdp),
        tensor_by=algorithm_name(assembly.collectives.tensor),
    )


def _sum_facts(execution: Execution) -> SumFacts:
    reducer = execution.reducer
    levels = isinstance(reducer, Hierarchical)
    return SumFacts(
        algorithm_name(reducer.slow if levels else reducer),
        algorithm_name(reducer.fast) if levels else None,
        execution.small_leaf,
        execution.reduce_layers,
    )


def algorithm_name(algorithm: Any) -> str:
    """The name in `collectives.steps.SCHEDULES` of an algorithm's value."""
    if isinstance(algorithm, Ring):
        return f"ring_{algorithm.directions}{'' if algorithm.unroll else '_looped'}"
    return "lax" if isinstance(algorithm, Lax) else "recursive"
