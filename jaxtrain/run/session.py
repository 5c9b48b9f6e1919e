"""A run made ready: data opened, program compiled, state on its devices."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.storage import DamagedCheckpoint
from jaxtrain.checkpoint.tiers import Checkpoints
from jaxtrain.cluster.phases import Phases
from jaxtrain.compression.sums import GuardReader, choose, program_key
from jaxtrain.experiment import Experiment, FromRun
from jaxtrain.mesh.compiler_options import option_violations
from jaxtrain.mesh.mesh import MeshSpec, make_mesh
from jaxtrain.mesh.spare_memory import spare_bytes
from jaxtrain.run.batches import Batches
from jaxtrain.run.evaluate import Evaluator
from jaxtrain.run.restore import restore_state
from jaxtrain.run.rows import open_split
from jaxtrain.run.saves.skips import Skips, skips_from
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.batches import fields_of
from jaxtrain.step.initial import initial_state
from jaxtrain.step.layer_order import AtRest, natural_shapes
from jaxtrain.step.state import TrainState
from jaxtrain.step.train_step import compile_step, trace_loss
from jaxtrain.validation.model import vocab_of
from jaxtrain.violations import raise_violations
from jaxtrain.weights.start import Start, settled_start, starting_params


@dataclass
class Session:
    """What a training loop works with. `state` is replaced at every step (its buffers are donated).

    `compiled` holds one program for each batch size met so far, and for compressed sums one for
    each `Choice`: the first step of another is compiled when it is met. `beside`: programs that
    run on the state between steps.
    """

    assembly: Assembly
    mesh: jax.sharding.Mesh
    shardings: TrainState
    dataset: Any
    state: TrainState
    start: int
    loader: Batches
    evaluate: Evaluator
    at_rest: AtRest
    compile_s: float
    compiled: dict[Any, Any] = field(default_factory=dict)
    beside: list[jax.stages.Compiled] = field(default_factory=list)
    begins: Start | None = None
    """What the first step of the run begins with, if the run did not make it."""
    guard: GuardReader = field(default_factory=GuardReader)
    phases: Phases = field(default_factory=Phases)
    _latest = None  # the program of the latest step
    dispatcher: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    @property
    def experiment(self) -> Experiment:
        return self.assembly.experiment

    @property
    def beginning(self) -> str:
        """What the parameters came from, for a line that goes on; nothing where they were made."""
        if isinstance(self.begins, FromRun):
            return f"from step {self.begins.step} of {self.begins.run_dir}, "
        return f"from {self.begins.folder}, " if self.begins is not None else ""

    def step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Dispatch one step on the next state; returns its metrics, not waited for.

        In a thread: a KeyboardInterrupt strikes in the main one, and so never between the donation
        of the old state and the arrival of the new.
        """
        return self.dispatcher.submit(self._dispatch, batch).result()

    def again(self, state: TrainState, batch: dict[str, jax.Array]) -> TrainState:
        """What the latest step would have made of `state`, which is donated."""
        assert self._latest is not None, "no step was taken"
        return self.dispatcher.submit(self._latest, state, batch).result()[0]

    def _dispatch(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        micro, rows = batch["rows"].shape
        choice = self.guard.choose(_reducer(self.assembly))
        which = program_key(micro * rows, choice)
        program = self.compiled.get(which)
        if program is None:
            with self.phases.within("compile"):
                program = compile_step(self.assembly, self.mesh, self.shardings, batch, choice)
            self.compiled[which] = program
        self._latest = program
        self.state, metrics = program(self.state, batch)
        self.guard.push(metrics)
        return metrics

    def spare_bytes(self) -> int:
        """What is free of the memory of each device of this process while any program of the run
        may run: steps (the largest batch's is the first), evaluations, and what `beside` has; 0
        where that is not known, as before the first evaluation, and where steps are taken twice,
        from a copy of the state. Waits for the step that runs: its memory is counted once."""
        evaluates = self.experiment.evaluation is not None
        if self._latest is None or self.experiment.execution.health.replay is not None:
            return 0
        if evaluates and self.evaluate.program is None:  # it may run before a copy has left
            return 0
        jax.block_until_ready(self.state)
        programs = [*self.compiled.values(), *self.beside]
        programs += [self.evaluate.program] if evaluates else []
        return min(spare_bytes(self.mesh.local_devices, program) for program in programs)

    def go_back(self, state: TrainState, step: int, skips: Skips) -> None:
        """Go on from a state after fewer steps, with other batches where `skips` says so."""
        self.loader.begin_at(step, skips)
        self.state = state
        self.guard = GuardReader(step, int(state.residuals.get("tripped", -1)))

    def beginning_state(self) -> TrainState:
        """The state that the run began with, made again."""
        given = starting_params(self.at_rest, self.begins or settled_start(self.assembly))
        return initialise(self.assembly, self.shardings, given)

    def alive(self) -> bool:
        """Whether the state can be read: a step that failed has donated it. Waits for what an
        interrupt left on its way."""
        self.evaluate.wait()
        self.dispatcher.submit(int).result()
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def close(self) -> None:
        self.loader.close()
        self.dispatcher.shutdown()


def open_session(
    experiment: Experiment,
    spec: MeshSpec,
    *,
    cache_dir: Path,
    checkpoints: Checkpoints | None = None,
    held_out: bool = False,
    phases: Phases | None = None,
) -> Session:
    """Raises ValueError for whatever does not fit, before anything is compiled or written; what can
    be told without the data before it is opened, which may mean to tokenise it.

    held_out: open the held-out data too, if the experiment evaluates. phases: where the time that
    it takes is told.
    """
    phases = phases or Phases()
    phases.enter("open")
    assembly = assemble(experiment, spec, {})
    mesh = active_mesh(make_mesh(spec), assembly.sizes)
    raise_violations(
        option_violations(dict(spec.compiler_options), mesh.devices.flat[0]), spec.where
    )
    start = (checkpoints.newest_whole() or 0) if checkpoints else 0
    begins = None if start else settled_start(assembly)
    dataset = open_split(experiment, "train", cache_dir, saved=checkpoints is not None)
    _check_vocabulary(experiment, dataset)
    if checkpoints is not None:
        _check_corpus(checkpoints, start, dataset)
    _skips(experiment, checkpoints, start)  # it may refuse them
    assembly = replace(assembly, fields=fields_of(dataset, experiment.data))
    if assembly.description is None:
        trace_loss(assembly)
    at_rest = AtRest(assembly, mesh)
    evaluate = Evaluator(assembly, mesh, cache_dir=cache_dir)
    if held_out and experiment.evaluation is not None:
        evaluate.open()
    if checkpoints is not None:
        checkpoints.check_space(natural_shapes(assembly))  # last: it makes the directory
    phases.enter("compile")
    began = time.perf_counter()
    # XLA compiles outside Python's lock: the step's program and the initial state's at once.
    with ThreadPoolExecutor(1) as pool:
        choice = choose(_reducer(assembly), start, -1)
        compiling = pool.submit(compile_step, assembly, mesh, at_rest.shardings, None, choice)
        with phases.within("restore" if start else "compile"):
            state, start = _first_state(at_rest, checkpoints, begins)
        program = compiling.result()
    compile_s = time.perf_counter() - began
    guard = GuardReader(start, int(state.residuals.get("tripped", -1)))
    skips = _skips(experiment, checkpoints, start)
    loader = Batches(assembly, mesh, dataset, start, skips)
    given = (dataset, state, start, loader, evaluate, at_rest, compile_s)
    session = Session(assembly, mesh, at_rest.shardings, *given)
    session.guard, session.begins, session.phases = guard, begins, phases
    session.compiled[program_key(assembly.largest_batch, choice)] = program
    return session


def _skips(experiment: Experiment, checkpoints: Checkpoints | None, start: int) -> Skips:
    """Raises ValueError as `skips_from`."""
    metadata = checkpoints.manifest(start).metadata if checkpoints and start else {}
    told = experiment.execution.health.skip_batches
    return skips_from(start, told, metadata.get("skipped", ()))


def _reducer(assembly: Assembly) -> Any:
    """What sums the gradients; None on one device, whose steps are all one program."""
    return assembly.experiment.execution.reducer if assembly.explicit else None


def _check_corpus(checkpoints: Checkpoints, start: int, dataset: Any) -> None:
    stored = checkpoints.manifest(start).metadata.get("data") if start else None
    if stored is not None and stored != dataset.digest:
        before, now = _apart(str(stored), str(dataset.digest))
        raise ValueError(
            f"the checkpoint of step {start} in {checkpoints.directory} was trained on another "
            f"corpus (digest {before}, now {now}): its rows would not be the ones that come next; "
            "bring the corpus back, or start a new run with another --run-dir"
        )


def _apart(a: str, b: str) -> tuple[str, str]:
    """Twelve characters of each of two words that differ, and where they begin to at the latest."""
    both = zip(a, b, strict=False)
    same = next((at for at, (x, y) in enumerate(both) if x != y), min(len(a), len(b)))
    begin = 0 if same < 12 else same - 4
    shown = (word[begin : begin + 12] for word in (a, b))
    before, now = (f"..{word}" if begin else word for word in shown)
    return before, now


def _first_state(
    at_rest: AtRest,
    checkpoints: Checkpoints | None,
    begins: Start | None,
) -> tuple[TrainState, int]:
    """Restored, and the step it is of: the newest that proves undamaged as it is read. Or born
    sharded: initialised under jit, each device making its part, or reading it."""
    while checkpoints is not None and (start := checkpoints.newest_whole()) is not None:
        with suppress(DamagedCheckpoint):  # the manager has it, and passes over the step now
            return restore_state(at_rest, checkpoints, start), start
    given = starting_params(at_rest, begins)
    return initialise(at_rest.assembly, at_rest.shardings, given), 0


def initialise(
    assembly: Assembly, where: TrainState, given: dict[str, jax.Array] | None = None
) -> TrainState:
    """The initial state on its devices; the same bits on every mesh. given: parameters that it
    begins with, as they rest; they are donated."""
    return initial_program(assembly, where)(given or {})


def initial_program(assembly: Assembly, where: TrainState) -> Any:
    """What `initialise` calls with the parameters given."""

    def make(given: dict[str, jax.Array]) -> TrainState:
        e, trained = assembly.experiment, assembly.places.keys() - assembly.frozen
        layout = None if assembly.pipeline is None else assembly.pipeline.layout
        how: Any = dict(derivative=assembly.first_derivative)
        return initial_state(e, assembly.transform, assembly.parts, layout, trained, given, **how)

    return jax.jit(make, out_shardings=where, donate_argnums=0)


def _check_vocabulary(experiment: Experiment, dataset: Any) -> None:
    vocab = vocab_of(experiment)
    ids = getattr(dataset, "vocab", None)
    if vocab is not None and ids is not None and ids > vocab:
        raise ValueError(
            f"the data has token ids up to {ids - 1} and model.vocab={vocab}; use vocab={ids} or "
            "another tokenizer"
        )
