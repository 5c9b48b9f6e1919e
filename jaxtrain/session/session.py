"""A run before its first step: data opened, program compiled, state on its devices."""

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
from jaxtrain.cluster.agreement import share_failure
from jaxtrain.cluster.phases import Phases
from jaxtrain.compression.sums import GuardReader, choose, program_key
from jaxtrain.experiment import Experiment, FromHuggingFace, FromRun, Start
from jaxtrain.experiment.stored import saved_differences
from jaxtrain.mesh.compiler_options import option_violations
from jaxtrain.mesh.mesh import MeshSpec, make_mesh
from jaxtrain.mesh.spare_memory import spare_bytes
from jaxtrain.notices import notice
from jaxtrain.scoring.reference import ReferenceFile
from jaxtrain.session.batches import Batches
from jaxtrain.session.branch import Branch
from jaxtrain.session.evaluate import Evaluator
from jaxtrain.session.first_state import initialise
from jaxtrain.session.held_out_sets import OWN
from jaxtrain.session.notes import starting
from jaxtrain.session.references import give_references
from jaxtrain.session.restore import restore_state
from jaxtrain.session.rows import open_split
from jaxtrain.session.skips import Skips, skips_from
from jaxtrain.session.tasks import tasks_of
from jaxtrain.step.assembly import Assembly, active_mesh, assemble
from jaxtrain.step.batches import fields_of
from jaxtrain.step.layer_order import AtRest, natural_shapes
from jaxtrain.step.losses import trace_loss
from jaxtrain.step.state import TrainState
from jaxtrain.step.train_step import compile_step
from jaxtrain.validation.own_data import check_vocabulary
from jaxtrain.violations import raise_violations
from jaxtrain.weights.start import settled_start, starting_params


@dataclass
class Session:
    """A run opened on a mesh: its data, state and programs. `Result.session` is one.

    assembly: the experiment as it lies on the mesh. mesh: of devices. shardings: of the leaves of
      the state. dataset: the rows to train on. state: after the latest step; the next one donates
      its buffers. start: steps done before this start. loader: gives the batches. evaluate: a
      function of a state that returns the held-out metrics, over the first `batches` batches or all
      (None). at_rest: how leaves of the state are ordered and split. compile_s: seconds that it
      took to compile the step. compiled: the step's programs, one for each batch size seen so far,
      with compressed sums for each `Choice`. other_programs: those that run between steps. begins:
      where the starting parameters or the whole state are from, None if the run initialises them,
      or resumed. guard: follows what compressed sums of gradients lose. phases: what the run is
      doing, for its supervisor. dispatcher: the thread in which steps are dispatched.
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
    other_programs: list[jax.stages.Compiled] = field(default_factory=list)
    begins: Start | Branch | None = None
    guard: GuardReader = field(default_factory=GuardReader)
    phases: Phases = field(default_factory=Phases)
    _latest = None  # the program of the latest step
    _first_scales = dict[str, jax.Array]()  # delayed, measured  # noqa: RUF012 (replaced)
    reference_files = list[ReferenceFile]()  # of the run directory  # noqa: RUF012 (replaced)
    dispatcher: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1))

    @property
    def experiment(self) -> Experiment:
        """The experiment, with the platform's kernels filled in."""
        return self.assembly.experiment

    @property
    def branch(self) -> Branch | None:
        """Where this start began, if it has its state from another run."""
        return self.begins if isinstance(self.begins, Branch) else None

    @property
    def beginning(self) -> str:
        """Source of the starting state, for an output line; empty if it was initialised."""
        if isinstance(self.begins, Branch):
            return f"branching off after {self.begins}, "
        if self.start:
            return f"resuming at step {self.start}, "
        if isinstance(self.begins, FromRun):
            return f"from step {self.begins.step} of {self.begins.run_dir}, "
        if not isinstance(self.begins, FromHuggingFace):
            return ""
        adapters = self.begins.adapters
        return f"from {self.begins.folder}{f' with {adapters}' if adapters else ''}, "

    def step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Dispatches one step on the next state; returns its metrics without waiting for them.

        It runs in a thread. A KeyboardInterrupt is raised in the main thread, and so never between
        the donation of the old state and the arrival of the new one.
        """
        return self.dispatcher.submit(self._dispatch, batch).result()

    def again(self, state: TrainState, batch: dict[str, jax.Array]) -> TrainState:
        """Repeats the latest step on `state`, which is donated. Returns the new state."""
        assert self._latest is not None, "no step was taken"
        return self.dispatcher.submit(self._latest, state, batch).result()[0]

    def _dispatch(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        micro, rows = batch["rows"].shape
        choice = self.guard.choose(_reducer(self.assembly))
        key = program_key(micro * rows, choice)
        program = self.compiled.get(key)
        if program is None:
            with self.phases.within("compile"):
                program = compile_step(self.assembly, self.mesh, self.shardings, batch, choice)
            self.compiled[key] = program
        self._latest = program
        self.state, metrics = program(self.state, batch)
        self.guard.push(metrics)
        return metrics

    def spare_bytes(self) -> int:
        """Free bytes on each device of this process while any program of the run may run: steps
        (the largest batch's is the first), evaluations, and `other_programs`. Returns 0 if that is
        not known (before the first evaluation) or if steps are run twice from a copy of the state.
        Waits for the running step: its memory is counted once."""
        evaluates = self.experiment.evaluation is not None
        if self._latest is None or self.experiment.execution.health.replay is not None:
            return 0
        others = self.evaluate.programs if evaluates else []
        if None in others:  # they may run before a copy has left
            return 0
        jax.block_until_ready(self.state)
        of_evaluations = [program for program in others if program is not None]
        programs = [*self.compiled.values(), *self.other_programs, *of_evaluations]
        return min(spare_bytes(self.mesh.local_devices, program) for program in programs)

    def go_back(self, state: TrainState, step: int, skips: Skips) -> None:
        """Continues from an earlier `state`, after `step` steps, with the batches of `skips`."""
        with self.phases.within("restore"):
            self.loader.begin_at(step, skips)
        self.state = state
        self.guard = GuardReader(step, int(state.residuals.get("tripped", -1)))

    def beginning_state(self) -> TrainState:
        """Recreates the state that the run began with."""
        assert not isinstance(self.begins, Branch), "it goes back to its own saves alone"
        loaded = starting_params(self.at_rest, self.begins or settled_start(self.assembly))
        state = initialise(self.assembly, self.shardings, loaded)
        copies = jax.tree.map(jax.numpy.copy, self._first_scales)  # a step donates them
        return replace(state, params={**state.params, **copies})

    def with_program(self, key: Any, program: Any) -> Session:
        """Takes the program of the first steps. Measures their delayed scales if nothing has: takes
        a step on the state, and begins anew with the scales that it found."""
        self.compiled[key] = program
        if (scales := self.assembly.buffers.scales) and not self.start and self.branch is None:
            after, _ = program(self.state, self.loader.peek(1)[0][1])
            self._first_scales = {name: after.params[name] for name in scales}
            del after  # before there is another state
            self.state = self.beginning_state()
        return self

    def alive(self) -> bool:
        """True if the state can be read: a failed step has donated it. Waits for programs that an
        interrupt left running."""
        self.evaluate.wait()
        self.dispatcher.submit(int).result()
        return not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))

    def close(self) -> None:
        """Ends the threads that load batches and dispatch steps."""
        self.loader.close()
        self.dispatcher.shutdown()


def open_session(
    experiment: Experiment,
    spec: MeshSpec,
    *,
    cache_dir: Path,
    checkpoints: Checkpoints | None = None,
    branch: Branch | None = None,
    held_out: bool = False,
    phases: Phases | None = None,
) -> Session:
    """Opens the data, compiles the step and restores or creates the state. Raises ValueError before
    anything is compiled or written, except where damage leads back to a step of another corpus;
    problems that need no data come before it is opened (and perhaps tokenised).

    branch: where the run begins, until `checkpoints` have a step of its own. held_out: also open
    the held-out data, if the experiment evaluates. phases: records times.
    """
    (phases := phases or Phases()).enter("open")
    assembly = assemble(experiment, spec, {})
    mesh = active_mesh(make_mesh(spec), assembly.sizes)
    refused = option_violations(dict(spec.compiler_options), mesh.devices.flat[0])
    raise_violations(refused, spec.where)
    start = (checkpoints.newest_whole() or 0) if checkpoints else 0
    begins = None if start else branch or settled_start(assembly)
    if isinstance(begins, Branch):
        start = begins.step
        share_failure(partial(begins.refuse_unfit, assembly))
        notice(begins.comparison(experiment))
    tasks = share_failure(lambda: tasks_of(experiment)) if held_out else None
    dataset = _open_data(experiment, cache_dir, checkpoints, start, begins)
    assembly = replace(assembly, fields=fields_of(dataset, experiment.data))
    if assembly.description is None:
        trace_loss(assembly)
    at_rest, evaluate = AtRest(assembly, mesh), Evaluator(assembly, mesh, cache_dir=cache_dir)
    if experiment.evaluation is not None and (held_out or experiment.objective is not None):
        evaluate.open(losses_alone=not held_out, tasks=tasks)
        _note_other_rows(evaluate, _metadata(checkpoints, start, begins))
    if checkpoints is not None:  # last: it makes the directory
        share_failure(partial(checkpoints.check_space, natural_shapes(assembly)))
    phases.enter("compile")
    notice("compiling the step" + (f", restoring step {start}" if start else ""))
    began = time.perf_counter()
    # XLA compiles outside Python's lock: the step's program and the initial state's at once.
    with ThreadPoolExecutor(1) as pool:
        choice = choose(_reducer(assembly), start, -1)
        compiling = pool.submit(compile_step, assembly, mesh, at_rest.shardings, None, choice)
        with phases.within("restore" if start else "compile"):
            state, start = _first_state(at_rest, checkpoints, begins, dataset)
        program = compiling.result()
    compile_s = time.perf_counter() - began
    with phases.within("open"):
        files = give_references(at_rest, dataset, evaluate, checkpoints, begins, state, start)
        skips = _skips(experiment, checkpoints, start, begins, dataset)
        loader = Batches(assembly, mesh, dataset, start, skips)
    fields = (dataset, state, start, loader, evaluate, at_rest, compile_s)
    session = Session(assembly, mesh, at_rest.shardings, *fields)
    session.begins, session.phases, session.reference_files = begins, phases, files
    session.guard = GuardReader(start, int(state.residuals.get("tripped", -1)))
    return session.with_program(program_key(assembly.largest_batch, choice), program)


def _open_data(
    experiment: Experiment,
    cache_dir: Path,
    checkpoints: Checkpoints | None,
    start: int,
    begins: Start | Branch | None,
) -> Any:
    """Returns the rows to train on. Raises ValueError where they are not those of the save that the
    run goes on from."""
    dataset = open_split(experiment, "train", cache_dir, saved=checkpoints is not None)
    check_vocabulary(experiment.model, dataset)
    for text in starting(experiment):
        notice(f"NOTE {text}")
    if isinstance(begins, Branch):
        notice(begins.next_rows(experiment, dataset))
    elif checkpoints is not None:
        _check_corpus(checkpoints, start, dataset, experiment)
    _skips(experiment, checkpoints, start, begins, dataset)  # raises early
    return dataset


def _skips(
    experiment: Experiment,
    checkpoints: Checkpoints | None,
    start: int,
    begins: Start | Branch | None,
    dataset: Any,
) -> Skips:
    """Skipped batches at step `start`. Raises ValueError as `skips_from` does."""
    if isinstance(begins, Branch):
        return begins.skips(experiment, dataset)
    metadata = _metadata(checkpoints, start, begins)
    configured = experiment.execution.health.skip_batches
    skips = skips_from(start, configured, metadata.get("skipped", ()))
    return skips._replace(shift=metadata.get("shift", 0))


def _metadata(
    checkpoints: Checkpoints | None, start: int, begins: Start | Branch | None
) -> dict[str, Any]:
    """Returns what the save that the run goes on from says of itself; {} if there is none."""
    if isinstance(begins, Branch):
        return begins.manifest.metadata
    return checkpoints.manifest(start).metadata if checkpoints and start else {}


def _note_other_rows(evaluate: Evaluator, metadata: dict[str, Any]) -> None:
    """Says so if held-out rows are not those of the save."""
    saved = {OWN: metadata.get("held_out")} | metadata.get("held_out_sets", {})
    for name, digest in evaluate.digests.items():
        if saved.get(name) not in (None, digest):
            data, end = (f"held-out set {name}", f"/{name}") if name else ("held-out data", "")
            notice(
                f"NOTE the {data} is not that of step {metadata.get('step')}: its eval_loss{end} "
                "does not compare with those before"
            )


def _reducer(assembly: Assembly) -> Any:
    """The reducer of the gradients; None on one device, where a single program serves all steps."""
    return assembly.experiment.execution.reducer if assembly.explicit else None


def _check_corpus(
    checkpoints: Checkpoints, start: int, dataset: Any, experiment: Experiment
) -> None:
    metadata = checkpoints.manifest(start).metadata if start else {}
    stored = metadata.get("data")
    if stored is not None and stored != dataset.digest:
        old, new = _apart(str(stored), str(dataset.digest))
        fields = saved_differences(metadata, experiment)
        changed = "".join(f"; {field}" for field in fields if field.path.startswith("data"))
        run = checkpoints.directory.parent
        raise ValueError(
            f"the checkpoint of step {start} in {checkpoints.directory} was trained on another "
            f"corpus (digest {old}, now {new}{changed}): its rows would not be the ones that come "
            "next; bring the corpus back, start a new run with another --run-dir, or go on with "
            f"this corpus in a branch, by --from {run} --name NEW. Runs of earlier versions had "
            "packing=DocumentStream() where documents have prompts, and "
            "TokenizerFile(add_bos=False)"
        )


def _apart(a: str, b: str) -> tuple[str, str]:
    """Twelve characters of each of two differing strings, so that the difference is visible."""
    both = zip(a, b, strict=False)
    same = next((position for position, (x, y) in enumerate(both) if x != y), min(len(a), len(b)))
    begin = 0 if same < 12 else same - 4
    shown = (word[begin : begin + 12] for word in (a, b))
    left, right = (f"..{word}" if begin else word for word in shown)
    return left, right


def _first_state(
    at_rest: AtRest,
    checkpoints: Checkpoints | None,
    begins: Start | Branch | None,
    dataset: Any,
) -> tuple[TrainState, int]:
    """Returns (state, step): restored from the branch's step or the newest undamaged save, or step
    0. A new state is created sharded: under jit, each device computes or reads its own shards.
    Raises ValueError where the save is of another corpus than `dataset`."""
    if isinstance(begins, Branch):
        return begins.restore(at_rest), begins.step
    experiment = at_rest.assembly.experiment
    while checkpoints is not None and (start := checkpoints.newest_whole()) is not None:
        # Of a step that damage led back to, too.
        _check_corpus(checkpoints, start, dataset, experiment)
        with suppress(DamagedCheckpoint):  # the manager noted it, and now skips this step
            return restore_state(at_rest, checkpoints, start), start
    loaded = starting_params(at_rest, begins)
    return initialise(at_rest.assembly, at_rest.shardings, loaded), 0
