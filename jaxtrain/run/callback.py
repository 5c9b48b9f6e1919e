"""What a user's code sees of a run while it runs, and what it may ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line listens to signals before it imports JAX
    from jaxtrain.cluster.requests import Requests
    from jaxtrain.experiment import Experiment
    from jaxtrain.run.session import Session
    from jaxtrain.step.state import TrainState


class Run:
    """A run as a `Callback` sees it: nothing here can be set. Steps are numbered from 1, as in
    metrics.jsonl."""

    def __init__(
        self,
        session: Session,
        run_dir: Path | None,
        last: int,
        tell: Callable[[str], None],
        requests: Requests,
    ) -> None:
        self._session, self._run_dir, self._tell = session, run_dir, tell
        self._steps, self._last, self._whole = session.start, last, last
        self._requests = requests

    @property
    def experiment(self) -> Experiment:
        """As it is run, with the settings applied."""
        return self._session.experiment

    @property
    def run_dir(self) -> Path | None:
        """Where the run is kept, None for memory alone."""
        return self._run_dir

    @property
    def start(self) -> int:
        """Steps that were done before this start of the run."""
        return self._session.start

    @property
    def steps(self) -> int:
        """Steps that are done, or on their way through the device."""
        return self._steps

    @property
    def last(self) -> int:
        """The step the run ends with."""
        return self._last

    @property
    def state(self) -> TrainState:
        """The state after `steps` steps, on its devices. Reading its numbers waits for them, and
        the next step takes its buffers: copy what is to last."""
        return self._session.state

    @property
    def first_process(self) -> bool:
        """Whether this is the process that writes the run's files and its lines."""
        import jax

        return jax.process_index() == 0

    def evaluates(self, step: int) -> bool:
        """Whether the held-out loss is taken after that step."""
        evaluation = self.experiment.evaluation
        return evaluation is not None and (step % evaluation.every == 0 or step == self._whole)

    def stop(self) -> None:
        """Ask the run to end after the step it is at, with that step saved. May be called from any
        thread, and from a signal handler; of several processes by any."""
        self._requests.ask("stop")

    def save(self) -> None:
        """Ask for a save after the step the run is at; there is none where the run saves
        nothing."""
        self._requests.ask("save")

    def tell(self, text: str) -> None:
        """A line of its own among those that the run prints."""
        self._tell(text)


class Running(Run):
    """The loop's own side of it."""

    @property
    def whole(self) -> int:
        """The step it was to end with, whatever stopped it."""
        return self._whole

    def advance(self, steps: int) -> None:
        self._steps = steps

    def end_at(self, step: int) -> None:
        self._steps = self._last = step

    def due(self, step: int) -> frozenset[str]:
        """What was asked for, by whichever process, and is done by all after `step`."""
        return self._requests.due(step)


class Callback:
    """Code of your own that a run calls: inherit from it and write the methods you want; the others
    do nothing. It is given to `train(callbacks=[...])`, or stands in `Logging.callbacks`.

    The order of one start: `begin`; for each step `before_step`, `after_step`, `metrics` of the
    step before it, `after_evaluation` and `after_save` where they are due; the `metrics` of the
    last step; `end`. After a spike of the loss comes `after_rollback`, and then steps come again.
    An evaluation and a save are preceded by the `metrics` of their own step. All are called in the
    main thread, on each callback in the order of the experiment's and then of `train`'s. The run
    waits for them.

    What `Run.stop` and `Run.save` ask for is done at the end of the step, after the evaluation and
    the save that are due. What a callback raises ends the run as any error does: the state is saved
    first. After an error or an interrupt `end` alone is called.

    With several processes each has its own callbacks, and calls all of them. A stop and a save may
    be asked for by any of them: all do it after the same step, which is not the one they are at but
    one soon after, when all have heard of it. Write files where `Run.first_process` says so.
    """

    def begin(self, run: Run) -> None:
        """The program is compiled, and the state is made or restored."""

    def before_step(self, run: Run, step: int) -> None:
        """`step` is dispatched next."""

    def after_step(self, run: Run, step: int) -> None:
        """`step` was dispatched; the device may be at it for a while yet. What waits for it here
        (a number read from `run.state`) leaves the device idle while the host prepares the next
        step: take numbers from `metrics`."""

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of `step`, as metrics.jsonl names them: Python floats, None for a speed that
        is not known yet and for the loss of a batch without a token to learn from. They come one
        step late, when `step + 1` was dispatched, so that the device never waits; of every step,
        however seldom one logs."""

    def after_evaluation(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        """The held-out metrics after `step`, such as eval_loss; {} where no token has a weight."""

    def after_save(self, run: Run, step: int) -> None:
        """A save of the state after `step` has begun: it is copied off the devices, and is written
        behind the next steps. That of the last step is committed."""

    def after_rollback(self, run: Run, step: int) -> None:
        """The loss had a spike (`LossSpikes`), and the run is at the state after `step` steps once
        more: `before_step` of the next comes again, with other rows, and its metrics. Forget what
        you hold of steps after it."""

    def end(self, run: Run) -> None:
        """The run is over, however it ended: at its last step, asked to stop, by an interrupt or an
        error. What could be saved is. Called on each callback, whatever another's raised."""
