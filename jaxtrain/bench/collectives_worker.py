"""One process of `bench collectives`: checks each algorithm against `lax`, then times both in turn.

Several processes form one machine (`jax.distributed`). For each collective and size every process
prints a JSON line `collective bytes seconds`: the seconds of each call, by algorithm, on its own
clock. On a machine that lacks the mesh's devices it prints only `refused`, with the reason.
"""

from __future__ import annotations

import base64
import json
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxtrain.bench.processes import end_with_parent
from jaxtrain.collectives import algorithm as collective
from jaxtrain.collectives.algorithm import Algorithm
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.matmul import gather_matmul, matmul_scatter
from jaxtrain.collectives.recursive import Recursive
from jaxtrain.collectives.ring import Ring
from jaxtrain.mesh.mesh import MeshSpec, make_mesh
from jaxtrain.mesh.sharding import named_sharding, partition_spec

Case = tuple[str, int, tuple[str, ...]]
"""Collective, bytes of the buffer, and the algorithms compared with lax."""

RINGS = {
    "ring_1": Ring(1),
    "ring_2": Ring(2),
    "ring_1_looped": Ring(1, unroll=False),
    "ring_2_looped": Ring(2, unroll=False),
}
ALGORITHMS: dict[str, Algorithm] = {"lax": Lax(), **RINGS, "recursive": Recursive()}
"""By the names of `steps.SCHEDULES`."""

MATMULS = ("gather_matmul", "matmul_scatter")
"""Collective matmuls. `lax` gathers x, then multiplies; or multiplies, then scatters."""

WIDTH, COLUMNS = 256, 128
"""Sizes of matmuls: least width of the gathered or scattered buffer if it is large enough, and the
other dim of the weight on a device."""

ITEMSIZE = 4
"""Everything is float32."""

ROOT = 0
_ARGUMENTS: dict[str, tuple[int, ...]] = {
    "all_gather": (0,),
    "reduce_scatter": (0,),
    "all_reduce": (),
    "all_to_all": (0, 0),
    "broadcast": (ROOT,),
    "reduce": (ROOT,),
    "gather": (0, ROOT),
    "scatter": (0, ROOT),
}
"""Dims (the only one), then the root."""


def calls(nbytes: int) -> int:
    """Returns the number of timed calls of each algorithm: the same in every process, fewer for
    large buffers."""
    return min(7, max(3, 2**25 // nbytes))


def local_shapes(name: str, n: int, nbytes: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the operands on one of n devices. nbytes: of the whole buffer on one
    device, as `cost` counts: the operand, or the gathered result; for matmuls the gathered x
    [tokens, width], or the product before it is scattered."""
    elements = nbytes // ITEMSIZE
    if name not in MATMULS:
        return ((elements // n if name in ("all_gather", "gather") else elements,),)
    tokens, width = 1, elements // n  # on each device
    while width % 2 == 0 and width >= 2 * WIDTH:
        tokens, width = 2 * tokens, width // 2
    if name == "gather_matmul":
        return (tokens, width), (width, COLUMNS)
    return (n * tokens, COLUMNS), (COLUMNS, width)


def on_device(name: str, algorithm: str, axes: tuple[str, ...]) -> Callable[..., jax.Array]:
    """Returns the function of local operands that is timed, inside `jax.shard_map`."""
    impl, ring = ALGORITHMS[algorithm], RINGS.get(algorithm)
    if name == "gather_matmul":
        if ring is None:
            return lambda x, w: collective.all_gather(x, axes, 0, impl) @ w
        return lambda x, w: gather_matmul(x, (w,), axes, ring)[0]
    if name == "matmul_scatter":
        if ring is None:
            return lambda x, w: collective.reduce_scatter(x @ w, axes, 0, impl)
        return lambda x, w: matmul_scatter((x,), (w,), axes, ring)
    return lambda x: getattr(collective, name)(x, axes, *_ARGUMENTS[name], impl)


@dataclass(frozen=True)
class Bench:
    """A mesh on which collectives over all of its devices are timed."""

    mesh: jax.sharding.Mesh
    axes: tuple[str, ...]

    @property
    def n(self) -> int:
        return self.mesh.devices.size

    def program(self, function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        """Returns a program that is compiled at its first call. Operands and result are split along
        dim 0."""
        split = partition_spec((self.axes,))
        return jax.jit(
            jax.shard_map(function, mesh=self.mesh, in_specs=split, out_specs=split, check_vma=True)
        )

    def operand(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns small integers, different on each device, whose sums are exact in any order."""

        def local(index: tuple[slice, ...] | None) -> np.ndarray:
            seed = index[0].start or 0 if index else 0
            draw = np.random.default_rng(seed).integers(-2, 3, 10007)
            return np.resize(draw.astype(np.float32), shape)

        global_shape = (self.n * shape[0], *shape[1:])
        return jax.make_array_from_callback(
            global_shape, named_sharding(self.mesh, (self.axes,)), local
        )

    def measure(self, name: str, nbytes: int, algorithms: Sequence[str]) -> dict[str, list[float]]:
        """Returns the seconds of each call, by algorithm, `lax` included. Raises RuntimeError for a
        result that is not `lax`'s to the bit, which is not timed."""
        operands = [self.operand(shape) for shape in local_shapes(name, self.n, nbytes)]
        programs = {
            algorithm: self.program(on_device(name, algorithm, self.axes))
            for algorithm in ("lax", *algorithms)
        }
        expected = programs["lax"](*operands).block_until_ready()
        for algorithm in algorithms:
            result = programs[algorithm](*operands).block_until_ready()
            check(result, expected, f"{algorithm} {name} of {nbytes} B")
            del result
        del expected
        return self.take_turns(programs, operands, calls(nbytes))

    def take_turns(
        self,
        programs: dict[str, Callable[..., jax.Array]],
        operands: Sequence[jax.Array],
        times: int,
    ) -> dict[str, list[float]]:
        """Runs every program once a round; another is first in each round. The processes
        synchronise before each call, since one may leave a collective long before the others."""
        barrier = self.program(on_device("all_reduce", "lax", self.axes))
        operand = self.operand((1,))
        names, seconds = list(programs), {name: [] for name in programs}
        for turn in range(times):
            first = turn % len(names)
            for name in [*names[first:], *names[:first]]:
                barrier(operand).block_until_ready()
                began = time.perf_counter()
                programs[name](*operands).block_until_ready()
                seconds[name].append(time.perf_counter() - began)
        return seconds


def check(result: jax.Array, expected: jax.Array, label: str) -> None:
    """Raises RuntimeError unless this process's shards are equal to the bit."""
    for shard, expected_shard in zip(
        result.addressable_shards, expected.addressable_shards, strict=True
    ):
        if not np.array_equal(shard.data, expected_shard.data):
            raise RuntimeError(f"{label} is not what lax gives on device {shard.device.id}")


def arguments_of(
    spec: MeshSpec, cases: Sequence[Case], *, processes: int, index: int, port: int
) -> list[str]:
    """Returns the arguments of worker `index`, after `python`."""
    packed = base64.b64encode(pickle.dumps((spec, tuple(cases), processes, index, port))).decode()
    return ["-m", "jaxtrain.bench.collectives_worker", packed]


def _main() -> int:
    end_with_parent()
    spec, cases, processes, index, port = pickle.loads(base64.b64decode(sys.argv[1]))
    if processes > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=processes, process_id=index)
    try:
        mesh = make_mesh(spec)
    except ValueError as error:
        _say(refused=str(error))
        return 2
    bench = Bench(mesh, tuple(axis for axis, size in spec.axes if size > 1))
    for name, nbytes, algorithms in cases:
        _say(collective=name, bytes=nbytes, seconds=bench.measure(name, nbytes, algorithms))
    return 0


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    raise SystemExit(_main())
