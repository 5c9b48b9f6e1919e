"""The view of a run that user callbacks get, and the requests they can make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line listens to signals before it imports JAX
    from jaxtrain.cluster.requests import Requests
    from jaxtrain.experiment import Experiment
    from jaxtrain.session.session import Session
    from jaxtrain.step.state import TrainState


class Run:
    """A run as a `Callback` sees it, read-only. Steps are numbered from 1, as in metrics.jsonl."""

    def __init__(
        self,
        session: Session,
        run_dir: Path | None,
        last: int,
        tell: Callable[[str], None],
        requests: Requests,
    ) -> None:
        self._session, self._run_dir, self._tell = session, run_dir, tell
        self._steps, self._last, self._planned = session.start, last, last
        self._requests = requests

    @property
    def experiment(self) -> Experiment:
        """The experiment being run, with the settings applied."""
        return self._session.experiment

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None for a run in memory only."""
        return self._run_dir

    @property
    def start(self) -> int:
        """Steps that were done before this start of the run."""
        return self._session.start

    @property
    def steps(self) -> int:
        """Steps that are done, or dispatched to the device."""
        return self._steps

    @property
    def last(self) -> int:
        """The step the run ends with."""
        return self._last

    @property
    def state(self) -> TrainState:
        """The state after `steps` steps, on its devices. Reading its numbers waits for them. The
        next step donates its buffers: copy what you keep."""
        return self._session.state

    @property
    def first_process(self) -> bool:
        """True in the process that writes the run's files and output."""
        import jax

        return jax.process_index() == 0

    def evaluates(self, step: int) -> bool:
        """True if the held-out loss is computed after `step`."""
        evaluation = self.experiment.evaluation
        return evaluation is not None and (step % evaluation.every == 0 or step == self._planned)

    def stop(self) -> None:
        """Asks the run to end after its current step, with that step saved. Any thread, signal
        handler or process may call it."""
        self._requests.ask("stop")

    def save(self) -> None:
        """Asks for a save after the current step; does nothing if the run saves nothing."""
        self._requests.ask("save")

    def tell(self, text: str) -> None:
        """Prints a line of its own in the run's output."""
        self._tell(text)


class Running(Run):
    """The training loop's view of a `Run`: it can also update it."""

    @property
    def planned_last(self) -> int:
        """The step the run was planned to end with, even if it was stopped earlier."""
        return self._planned

    def advance(self, steps: int) -> None:
        self._steps = steps

    def end_at(self, step: int) -> None:
        self._steps = self._last = step

    def due(self, step: int) -> frozenset[str]:
        """Requests, from any process, that all processes carry out after `step`."""
        return self._requests.due(step)


class Callback:
    """Code of your own that a run calls: inherit from it and write the methods you want; the others
    do nothing. Pass it to `train(callbacks=[...])`, or list it in `Logging.callbacks`.

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
        """`step` was dispatched; the device may still be running it. Waiting for it here (reading a
        number from `run.state`) leaves the device idle while the host prepares the next step: use
        `metrics` for numbers."""

    def metrics(self, run: Run, step: int, values: Mapping[str, Any]) -> None:
        """The numbers of `step`, named as in metrics.jsonl: Python floats; None for a speed that is
        not known yet, and for the loss of a batch without trained tokens. They come for every step,
        one step late (after `step + 1` was dispatched), so that the device never waits."""

    def after_evaluation(self, run: Run, step: int, values: Mapping[str, float]) -> None:
        """The held-out metrics after `step`, such as eval_loss; {} if no token has a weight."""

    def after_save(self, run: Run, step: int) -> None:
        """A save of the state after `step` has begun: the state is copied off the devices, and
        written during the next steps. The save of the last step is already committed."""

    def after_rollback(self, run: Run, step: int) -> None:
        """After a spike of the loss (`LossSpikes`) the run went back to the state after `step`
        steps. `before_step` of the next step comes again, with other rows, and its metrics. Discard
        what you keep of later steps."""

    def end(self, run: Run) -> None:
        """The run is over: it reached its last step, was asked to stop, was interrupted or failed.
        What could be saved is saved. Called on each callback, even if another one raised."""
