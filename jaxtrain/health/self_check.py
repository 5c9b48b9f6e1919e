"""Compares the first steps of a start with the same steps in the plainest configuration.

A kernel, an algorithm or a compiler option that computes wrongly does so from the first step, on
every device alike. Neither copies nor repeated steps show it.
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
from jaxtrain.collectives.lax_form import Lax
from jaxtrain.collectives.rounded import Rounded
from jaxtrain.compression.compressed import Compressed
from jaxtrain.compression.sums import Choice, program_key
from jaxtrain.experiment import Experiment
from jaxtrain.mesh.mesh import MeshSpec
from jaxtrain.moe.block_loop import BlockLoop
from jaxtrain.operations.block import mixtures
from jaxtrain.optim.precision import BOUNDS
from jaxtrain.session.session import Session
from jaxtrain.step.assembly import Assembly, assemble, try_assemble
from jaxtrain.step.layer_order import AtRest
from jaxtrain.step.running_kernels import kernels_of
from jaxtrain.step.state import TrainState
from jaxtrain.step.train_step import compile_step

COMPARED = ("loss", "grad_norm")

BOUND_STEPS = 5
"""Steps that the bounds (the certificate's) are for; rounding grows with more."""

DENSE_BYTES = 2**26
"""Bytes of scores per device and layer above which `Blockwise` is the plain kernel."""

Setup = tuple[Experiment, MeshSpec]
NumberedBatches = Sequence[tuple[int, dict[str, jax.Array]]]


class Aspect(NamedTuple):
    """A setting that is not the safe one. plain: applies the safe one; fix: remedy."""

    plain: Callable[[Experiment, MeshSpec], Setup]
    fix: str


class Deviation(NamedTuple):
    """A metric of a step that differs too much. relative: distance over the safe value."""

    step: int
    name: str
    run: float
    safe: float
    relative: float
    bound: float

    def __str__(self) -> str:
        return (
            f"step {self.step} has {self.name} {self.run:.8g} and in the safe configuration "
            f"{self.safe:.8g}, {self.relative:.1e} apart, at most {self.bound:.1e}"
        )


def plain_kernel(devices: int) -> AttentionKernel:
    """The dense definition of attention if a device's scores are small, else `Blockwise`."""

    def kernel(
        q: jax.Array, k: jax.Array, v: jax.Array, starts: Starts | None, scoring: Scoring
    ) -> Attended:
        batch, seq, heads, _ = q.shape
        few = 4 * batch * heads * seq**2 <= DENSE_BYTES * devices
        return (Reference() if few else Blockwise())(q, k, v, starts, scoring)

    return kernel


class SelfCheck:
    """Check of a session that has taken no step. copy: copies its state."""

    def __init__(self, session: Session, copy: Callable[[TrainState], TrainState]) -> None:
        self._session, self._copy = session, copy
        self._tested = uncompressed(session.assembly)
        self.aspects = aspects_of(self._tested)

    def run(self, steps: int, tell: Callable[[str], None]) -> None:
        """Takes the next `steps` steps in both configurations; the session is unchanged. Raises
        ValueError, on all processes, if they differ."""
        if not self.aspects:
            tell("NOTE self-check: this is the safe configuration already; nothing to hold it to")
            return
        batches = self._session.loader.peek(steps)
        actual, safe = self._taken(self._tested, batches), self._taken(self._plain(), batches)
        deviations = self._apart(actual, safe)
        if any(all_gather_union([str(deviation) for deviation in deviations])):
            raise ValueError(self._message(deviations, self._culprits(batches, safe)))
        numbers = zip(sum(actual, ()), sum(safe, ()), strict=True)
        worst = max(_distance(a, b) for a, b in numbers)
        exact = "" if self._tested is self._session.assembly else ", sums not compressed,"
        tell(
            f"NOTE self-check: {len(batches)} steps{exact} are within {worst:.1e} of the safe "
            f"configuration, which differs in {_list(map(_field, self.aspects))}"
        )

    def _plain(self, keeps: Collection[str] = ()) -> Assembly:
        """The safe configuration, with the aspects in `keeps` as the run has them."""
        setup = (self._tested.experiment, self._tested.spec)
        for name, aspect in self.aspects.items():
            if name not in keeps:
                setup = aspect.plain(*setup)
        return assemble(*setup, self._tested.fields)

    def _taken(self, assembly: Assembly, batches: NumberedBatches) -> list[tuple[float, ...]]:
        """Metrics of each step, from a copy of the session's state."""
        session, own = self._session, assembly is self._session.assembly
        state = self._copy(session.state)
        if not own:
            state = replace(state, residuals={})
        programs = dict(session.compiled) if own else {}
        at_rest, results = AtRest(assembly, session.mesh), []
        for _, batch in batches:
            key = program_key(math.prod(batch["rows"].shape), Choice())
            if key not in programs:
                programs[key] = self._compiled(assembly, at_rest.shardings, batch)
            # One at a time: simulated devices hang in the collectives of two programs.
            state, metrics = jax.block_until_ready(programs[key](state, batch))
            results.append(tuple(float(metrics[name]) for name in COMPARED))
        return results

    def _compiled(self, assembly: Assembly, shardings: TrainState, batch: Any) -> Any:
        """Compiles without rematerialisation if the activations fit the chip, else with it."""
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
        self, actual: Sequence[tuple[float, ...]], safe: Sequence[tuple[float, ...]]
    ) -> list[Deviation]:
        first, bound = self._session.start + 1, bound_of(self._tested)
        deviations = []
        for n, (run, plain) in enumerate(zip(actual, safe, strict=True)):
            most = bound * max(1.0, (n + 1) / BOUND_STEPS)
            for name, a, b in zip(COMPARED, run, plain, strict=True):
                if not (relative := _distance(a, b)) <= most:
                    deviations.append(Deviation(first + n, name, a, b, relative, most))
        return deviations

    def _culprits(self, batches: NumberedBatches, safe: Sequence[tuple[float, ...]]) -> list[str]:
        """Aspects that alone make the safe configuration differ too."""
        culprits = []
        for name in self.aspects if len(self.aspects) > 1 else ():
            try:
                candidate = self._plain(keeps=(name,))
            except ValueError:  # this aspect needs the others
                continue
            if self._apart(self._taken(candidate, batches), safe):
                culprits.append(name)
        return culprits

    def _message(self, apart: Sequence[Deviation], culprits: list[str]) -> str:
        blamed = culprits or list(self.aspects)
        fixes = [self.aspects[name].fix for name in blamed]
        alone = f"; with {_list(culprits)} alone it differs too" if culprits else ""
        return (
            f"self-check: {apart[0] if apart else 'another process found a difference'}; the two "
            f"differ in {_list(self.aspects)}{alone}; nothing was saved: {', or '.join(fixes)}"
        )


def uncompressed(assembly: Assembly) -> Assembly:
    """The run's assembly, with exact sums instead of compressed ones, which change learning."""
    e = assembly.experiment
    reducer = e.execution.reducer
    if not isinstance(reducer, Compressed):
        return assembly
    return assemble(_with(e, reducer=reducer.by), assembly.spec, assembly.fields)


def aspects_of(assembly: Assembly) -> dict[str, Aspect]:
    """Settings in which the safe configuration differs, by the run's setting; {} if none."""
    aspects, execution = {}, assembly.experiment.execution
    if options := dict(assembly.spec.compiler_options):
        named = ", ".join(f"{name}={value!r}" for name, value in options.items())
        aspects[f"compiler_options of the mesh ({named})"] = Aspect(
            lambda e, spec: (e, replace(spec, compiler_options=())),
            "remove the compiler options from the mesh file",
        )
    if assembly.description is None:
        return aspects
    if not isinstance(execution.attention, Reference):
        plain = plain_kernel(math.prod(assembly.sizes.values()))
        aspects[f"attention={execution.attention!r}"] = Aspect(
            lambda e, spec: (_with(e, attention=plain), spec), "use another execution.attention"
        )
    if any(kernel != str(BlockLoop()) for kernel in kernels_of(assembly, mixtures) or ()):
        aspects[f"grouped_matmul={execution.grouped_matmul!r}"] = Aspect(
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
        aspects[f"loop={loop!r}"] = Aspect(
            lambda e, spec: (_with(e, loop=plain_loop), spec), f"use execution.loop={plain_loop!r}"
        )
    return aspects | (_sums_of(assembly) if assembly.explicit else {})


def _sums_of(assembly: Assembly) -> dict[str, Aspect]:
    """Our collectives against XLA's own; against `lax`'s for layouts that GSPMD cannot run."""
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
    """Largest relative distance allowed, by the dtypes and the precision of matmuls."""
    precision = assembly.experiment.precision
    dtypes = (precision.params, precision.compute, precision.reduce)
    narrow = min(jnp.dtype(dtype).itemsize for dtype in dtypes) < 4
    narrow = narrow or isinstance(assembly.experiment.execution.reducer, Rounded)
    narrow = narrow or precision.products is not None
    passes = precision.matmul != "highest" and assembly.spec.platform != "cpu"
    return BOUNDS["bfloat16" if narrow or passes else "float32"]


def _with(experiment: Experiment, **fields: Any) -> Experiment:
    """The experiment with these fields of its execution replaced."""
    return replace(experiment, execution=replace(experiment.execution, **fields))


def _distance(a: float, b: float) -> float:
    """|a-b| / |b|; 0 if neither is finite, infinite if one is not."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf if math.isfinite(a) or math.isfinite(b) else 0.0
    return abs(a - b) / max(abs(b), 1e-30)


def _bytes_of(program: Any) -> int:
    """Bytes on a device: the program, and the state that waits for its own first step."""
    analysis = program.memory_analysis()
    return 2 * analysis.argument_size_in_bytes + analysis.temp_size_in_bytes


def _field(name: str) -> str:
    return name.partition("=")[0].partition(" ")[0]


def _list(names: Any) -> str:
    return ", ".join(names)
