"""The first steps of a start, held against the same steps taken in the plainest way there is.

A kernel, an algorithm or a compiler option that computes something else than it should does so from
the first step on, on every device alike: neither copies nor steps taken twice show it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtrain.attention.blockwise import Blockwise
from jaxtrain.attention.documents import Starts
from jaxtrain.attention.fused import Attended
from jaxtrain.attention.kernels import AttentionKernel, Reference
from jaxtrain.attention.online_softmax import Scoring
from jaxtrain.cluster.agreement import all_gather_union
from jaxtrain.collectives.choice import Collectives
from jaxtrain.collectives.compressed import Compressed
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.rounded import Rounded
from jaxtrain.compression.sums import Choice, program_key
from jaxtrain.experiment import Experiment
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.models.description import ExpertCall
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.optim.precision import BOUNDS
from jaxtrain.run.session import Session
from jaxtrain.step.assembly import Assembly, assemble, try_assemble
from jaxtrain.step.layer_order import AtRest
from jaxtrain.step.running_kernels import kernels_of
from jaxtrain.step.state import TrainState
from jaxtrain.step.train_step import compile_step

COMPARED = ("loss", "grad_norm")

BOUND_STEPS = 5
"""The bounds are the certificate's, which are for so many steps; rounding grows with more."""

DENSE_BYTES = 2**26
"""Of scores on a device, in a layer: with more than that `Blockwise` is the plain kernel."""

Given = tuple[Experiment, MeshSpec]
Batches = Sequence[tuple[int, dict[str, jax.Array]]]


class Aspect(NamedTuple):
    """What the safe configuration has otherwise. plain: it instead; fix: what to try."""

    plain: Callable[[Experiment, MeshSpec], Given]
    fix: str


class Apart(NamedTuple):
    """A number of a step that is not the same both ways. by: relative to the safe one."""

    step: int
    name: str
    run: float
    safe: float
    by: float
    bound: float

    def __str__(self) -> str:
        return (
            f"step {self.step} has {self.name} {self.run:.8g} and in the safe configuration "
            f"{self.safe:.8g}, {self.by:.1e} apart, at most {self.bound:.1e}"
        )


def plain_kernel(devices: int) -> AttentionKernel:
    """The dense definition of attention where a device's scores are few, else `Blockwise`."""

    def kernel(
        q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts | None, scoring: Scoring
    ) -> Attended:
        batch, seq, heads, _ = q.shape
        few = 4 * batch * heads * seq**2 <= DENSE_BYTES * devices
        return (Reference() if few else Blockwise())(q, k, v, starts, scoring)

    return kernel


class SelfCheck:
    """Of a session that has taken no step. copy: of its state."""

    def __init__(self, session: Session, copy: Callable[[TrainState], TrainState]) -> None:
        self._session, self._copy = session, copy
        self._tested = uncompressed(session.assembly)
        self.aspects = aspects_of(self._tested)

    def run(self, steps: int, tell: Callable[[str], None]) -> None:
        """Take the next `steps` steps in both configurations; the session is as it was. Raises
        ValueError, on all processes, where they differ."""
        if not self.aspects:
            tell("NOTE self-check: this is the safe configuration already; nothing to hold it to")
            return
        batches = self._session.loader.peek(steps)
        here, safe = self._taken(self._tested, batches), self._taken(self._plain(), batches)
        found = self._apart(here, safe)
        if any(all_gather_union([str(each) for each in found])):
            raise ValueError(self._told(found, self._culprits(batches, safe)))
        numbers = zip(sum(here, ()), sum(safe, ()), strict=True)
        worst = max(_distance(a, b) for a, b in numbers)
        exact = "" if self._tested is self._session.assembly else ", sums not compressed,"
        tell(
            f"NOTE self-check: {len(batches)} steps{exact} are within {worst:.1e} of the safe "
            f"configuration, which differs in {_list(map(_field, self.aspects))}"
        )

    def _plain(self, keeps: Collection[str] = ()) -> Assembly:
        """The safe configuration, but for the aspects that it keeps as the run has them."""
        given = (self._tested.experiment, self._tested.spec)
        for name, aspect in self.aspects.items():
            if name not in keeps:
                given = aspect.plain(*given)
        return assemble(*given, self._tested.fields)

    def _taken(self, assembly: Assembly, batches: Batches) -> list[tuple[float, ...]]:
        """The numbers of each step, all from a copy of the session's state."""
        session, own = self._session, assembly is self._session.assembly
        state = self._copy(session.state)
        if not own:
            state = replace(state, residuals={})
        programs = dict(session.compiled) if own else {}
        at_rest, found = AtRest(assembly, session.mesh), []
        for _, batch in batches:
            key = program_key(math.prod(batch["rows"].shape), Choice())
            if key not in programs:
                programs[key] = self._compiled(assembly, at_rest.shardings, batch)
            # One at a time: simulated devices hang in the collectives of two programs.
            state, metrics = jax.block_until_ready(programs[key](state, batch))
            found.append(tuple(float(metrics[name]) for name in COMPARED))
        return found

    def _compiled(self, assembly: Assembly, shardings: TrainState, batch: Any) -> Any:
        """Without rematerialisation only where the chip has room for what is kept then."""
        spec, mesh = assembly.spec, self._session.mesh
        try:
            program = compile_step(assembly, mesh, shardings, batch)
            if spec.simulated or _bytes_of(program) <= spec.usable_bytes:
                return program
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
        full = replace(assembly, loop=replace(assembly.loop, remat="full", offload=()))
        return compile_step(full, mesh, shardings, batch)

    def _apart(
        self, here: Sequence[tuple[float, ...]], safe: Sequence[tuple[float, ...]]
    ) -> list[Apart]:
        first, bound = self._session.start + 1, bound_of(self._tested)
        found = []
        for n, (run, plain) in enumerate(zip(here, safe, strict=True)):
            most = bound * max(1.0, (n + 1) / BOUND_STEPS)
            for name, a, b in zip(COMPARED, run, plain, strict=True):
                if not (by := _distance(a, b)) <= most:
                    found.append(Apart(first + n, name, a, b, by, most))
        return found

    def _culprits(self, batches: Batches, safe: Sequence[tuple[float, ...]]) -> list[str]:
        """The aspects with which alone the safe configuration comes out otherwise too."""
        found = []
        for name in self.aspects if len(self.aspects) > 1 else ():
            try:
                one = self._plain(keeps=(name,))
            except ValueError:  # it does not go without the others
                continue
            if self._apart(self._taken(one, batches), safe):
                found.append(name)
        return found

    def _told(self, found: Sequence[Apart], culprits: list[str]) -> str:
        blamed = culprits or list(self.aspects)
        fixes = [self.aspects[name].fix for name in blamed]
        alone = f"; with {_list(culprits)} alone it differs too" if culprits else ""
        return (
            f"self-check: {found[0] if found else 'another process found a difference'}; the two "
            f"differ in {_list(self.aspects)}{alone}; nothing was saved: {', or '.join(fixes)}"
        )


def uncompressed(assembly: Assembly) -> Assembly:
    """The run's own; with exact sums where it compresses them, which changes what is learned."""
    e = assembly.experiment
    reducer = e.execution.reducer
    if not isinstance(reducer, Compressed):
        return assembly
    return assemble(_with(e, reducer=reducer.by), assembly.spec, assembly.fields)


def aspects_of(assembly: Assembly) -> dict[str, Aspect]:
    """What the safe configuration has otherwise, by how the run has it; {} where nothing is."""
    found, execution = {}, assembly.experiment.execution
    if options := dict(assembly.spec.compiler_options):
        named = ", ".join(f"{name}={value!r}" for name, value in options.items())
        found[f"compiler_options of the mesh ({named})"] = Aspect(
            lambda e, spec: (e, replace(spec, compiler_options=())),
            "remove the compiler options from the mesh file",
        )
    if assembly.description is None:
        return found
    if not isinstance(execution.attention, Reference):
        plain = plain_kernel(math.prod(assembly.sizes.values()))
        found[f"attention={execution.attention!r}"] = Aspect(
            lambda e, spec: (_with(e, attention=plain), spec), "use another execution.attention"
        )
    if any(kernel != str(BlockLoop()) for kernel in kernels_of(assembly, ExpertCall) or ()):
        found[f"grouped_matmul={execution.grouped_matmul!r}"] = Aspect(
            lambda e, spec: (_with(e, grouped_matmul=BlockLoop()), spec),
            "use another execution.grouped_matmul",
        )
    loop = assembly.loop
    plain_loop = replace(
        loop,
        remat="none",
        offload=(),
        prefetch=loop.unroll and loop.prefetch,
        reshard_after_forward=True,
    )
    if loop != plain_loop:
        found[f"loop={loop!r}"] = Aspect(
            lambda e, spec: (_with(e, loop=plain_loop), spec), f"use execution.loop={plain_loop!r}"
        )
    return found | (_sums_of(assembly) if assembly.explicit else {})


def _sums_of(assembly: Assembly) -> dict[str, Aspect]:
    """Our collectives against XLA's own; in what XLA cannot do alone, against `lax`'s."""
    e, spec = assembly.experiment, assembly.spec
    own = dict(
        collectives=assembly.collectives,
        reducer=e.execution.reducer,
        reduce_layers=e.execution.reduce_layers,
    )
    name = ", ".join(f"{key}={value!r}" for key, value in own.items())
    exact: dict[str, Any] = dict(reducer=Lax(), reduce_layers=False)
    gspmd = dict(mode="gspmd", collectives=None, **exact)
    lax = dict(collectives=Collectives(), **exact)
    alone = not try_assemble(_with(e, **gspmd), spec, assembly.fields)[1]
    if not alone and own == lax:
        return {}
    fix = "use execution.mode='gspmd'" if alone else "use Collectives() and reducer=Lax()"
    chosen = gspmd if alone else lax
    return {f"mode='explicit' ({name})": Aspect(lambda e, spec: (_with(e, **chosen), spec), fix)}


def bound_of(assembly: Assembly) -> float:
    """How far apart a number may be: as dtypes round, and as matrices are multiplied."""
    precision = assembly.experiment.precision
    dtypes = (precision.params, precision.compute, precision.reduce)
    narrow = min(jnp.dtype(each).itemsize for each in dtypes) < 4
    narrow = narrow or isinstance(assembly.experiment.execution.reducer, Rounded)
    narrow = narrow or precision.products is not None
    passes = precision.matmul != "highest" and assembly.spec.platform != "cpu"
    return BOUNDS["bfloat16" if narrow or passes else "float32"]


def _with(experiment: Experiment, **fields: Any) -> Experiment:
    """With another execution, in these fields."""
    return replace(experiment, execution=replace(experiment.execution, **fields))


def _distance(a: float, b: float) -> float:
    """|a-b| / |b|; 0 of two that are not finite, infinite where one is."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf if math.isfinite(a) or math.isfinite(b) else 0.0
    return abs(a - b) / max(abs(b), 1e-30)


def _bytes_of(program: Any) -> int:
    """What a device holds at once, with the state that waits for its own first step."""
    found = program.memory_analysis()
    return 2 * found.argument_size_in_bytes + found.temp_size_in_bytes


def _field(name: str) -> str:
    return name.partition("=")[0].partition(" ")[0]


def _list(names: Any) -> str:
    return ", ".join(names)
