"""The only training loop."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxddp.data.batch import Batch
from jaxddp.engine.objective import MetricSums
from jaxddp.engine.state import TrainState
from jaxddp.errors import Preempted
from jaxddp.measure.profile import Profile
from jaxddp.measure.usage import Used
from jaxddp.training.checkpoints import Checkpoints
from jaxddp.training.evaluation import Evaluator
from jaxddp.training.events import EpochFigures, EvaluationRecord, Listener, RunEnd, RunStart, StepRecord
from jaxddp.training.meter import Meter
from jaxddp.training.plan import Plan


class Chunk(NamedTuple):
    """Steps that are dispatched together, and what the program that takes them is given beside the state."""

    steps: int
    feed: Any


Step = Callable[[TrainState, Any], tuple[TrainState, MetricSums]]
"""(state, a chunk's feed) -> (state, sums): of one step, or stacked those of each; see `Meter.add`."""
Chunks = Callable[[int], Iterator[Chunk]]
"""How many steps are done -> the chunks of all that follow; nothing is due before a chunk's end (`Plan.chunks`)."""


def single_steps(batches: Iterable[Batch]) -> Iterator[Chunk]:
    """Placed batches as chunks of one step each."""
    return (Chunk(1, batch) for batch in batches)


def fit(
    step: Step,
    state: TrainState,
    chunks: Chunks,
    *,
    plan: Plan,
    start: RunStart,
    evaluator: Evaluator | None = None,
    checkpoints: Checkpoints | None = None,
    listeners: Sequence[Listener] = (),
    learning_rate: Callable[[int], Any] | None = None,
    progress: dict[str, Any] | None = None,
    validated: bool = True,
    should_stop: Callable[[int], bool] = lambda step: False,
    usage: Callable[[float | None], Used] = lambda images_per_second: Used(),
    profile: Path | None = None,
) -> TrainState:
    """Train from the state's step to the plan's last, and return the last state. `state` is consumed.

    The order of operations, for each chunk of steps, of which there is often but one:

    1. take what its steps are fed with (time spent here is `data_wait_fraction`);
    2. dispatch them; the host does not wait for them;
    3. where figures are due (the log cadence, an epoch's end, anything of 4 or 5): fetch those of all steps since, stop
       if a loss is not finite, tell the listeners;
    4. where a checkpoint is due, or the run was asked to stop: save;
    5. where validation is due: evaluate, tell the listeners, put the figures beside the checkpoint of 4. If it fails,
       that checkpoint is there; if the run is asked to stop meanwhile, one is saved. Who resumes validates it first.

    Args:
        learning_rate: a schedule, 0 for the first step, to be shown.
        progress: as saved with the checkpoint that `state` was restored from.
        validated: whether that checkpoint was validated; else it is now, where validation is due there.
        should_stop: asked after every chunk and between batches of validation; all processes must answer alike.
        usage: how well the devices are used at a speed, for the records; see `jaxddp.measure.usage`.
        profile: where a trace of the steps goes that the plan names; None for none.

    Raises:
        NonFiniteError: a loss or the state is not finite. Nothing of it is saved.
        InputError: more images than the plan allows had others stand in for them.
        Preempted: `should_stop` said so; the state was saved.
    """
    meter = Meter(plan.batch_size, progress, plan.max_substituted)
    run = _Run(plan, evaluator, checkpoints, learning_rate, meter, usage, should_stop)
    done, begin = int(state.step), time.perf_counter()
    run.step = done
    try:
        run.start(listeners, start)
        if not validated:
            run.validate(done, state, saved=True)
        stream = chunks(done)
        with Profile(profile, plan.traced(done), meter.paused) as traced:
            while done < plan.total_steps:
                with traced.step(done + 1, state):
                    with meter.waiting_for_data():
                        chunk = next(stream)
                    state, sums = step(state, chunk.feed)
                meter.add(range(done + 1, done + chunk.steps + 1), sums)
                done += chunk.steps
                traced.done(done, state)
                run.end_step(done, state)
        if checkpoints:
            checkpoints.wait()
    except BaseException as error:
        status = "preempted" if isinstance(error, Preempted) else "failed"
        run.fail(RunEnd(status, run.step, time.perf_counter() - begin, run.validation, str(error), run.used), error)
        raise
    run.tell("end", RunEnd("done", run.step, time.perf_counter() - begin, run.validation, used=usage(meter.rate())))
    return state


class _Run:
    """What one call of `fit` keeps between steps, beside the state."""

    def __init__(
        self,
        plan: Plan,
        evaluator: Evaluator | None,
        checkpoints: Checkpoints | None,
        learning_rate: Callable[[int], Any] | None,
        meter: Meter,
        usage: Callable[[float | None], Used],
        should_stop: Callable[[int], bool],
    ):
        self.plan, self.evaluator, self.checkpoints = plan, evaluator, checkpoints
        self.learning_rate, self.meter, self.usage, self.should_stop = learning_rate, meter, usage, should_stop
        self.listeners: list[Listener] = []
        self.validation: Mapping[str, float] = {}
        self.step, self.used = 0, Used()

    def start(self, listeners: Sequence[Listener], record: RunStart) -> None:
        """Only those that started hear of the rest."""
        for listener in listeners:
            listener.start(record)
            self.listeners.append(listener)

    def tell(self, moment: str, record: Any) -> None:
        for listener in self.listeners:
            getattr(listener, moment)(record)

    def fail(self, record: RunEnd, error: BaseException) -> None:
        """Tell everyone of the end; a listener that fails at it must not hide the reason of it."""
        for listener in self.listeners:
            try:
                listener.end(record)
            except Exception as another:
                error.add_note(f"then {type(listener).__name__}.end failed: {another}")

    def end_step(self, step: int, state: TrainState) -> None:
        stop = self.should_stop(step)
        saves, validates = self.plan.saves(step) or stop, self._validates(step)
        if self.plan.logs(step) or saves or validates:
            self.record(step)
        self.step = step
        if saves:
            self._save(step, state)
        if stop and (validates or not self.plan.last(step)):
            self._leave(step)
        self.validate(step, state, saved=saves)

    def _validates(self, step: int) -> bool:
        return self.evaluator is not None and self.plan.evaluates(step)

    def _save(self, step: int, state: TrainState) -> None:
        if self.checkpoints:
            self.checkpoints.save(step, state, self.meter.progress())
        self.meter.resume()

    def _leave(self, step: int) -> None:
        if self.checkpoints:
            self.checkpoints.wait()
        raise Preempted(f"asked to stop: saved step {step} of {self.plan.total_steps}; the same command resumes it")

    def record(self, step: int) -> None:
        metrics = self.meter.fetch()
        images_per_second, data_wait = self.meter.rates()
        ended = None
        if self.plan.epochs.due(step):
            means, seconds = self.meter.end_epoch()
            ended = EpochFigures(self.plan.epochs.count(step), means, seconds)
        rate = None if self.learning_rate is None else float(self.learning_rate(step - 1))
        epoch = self.plan.epoch(step)
        self.used = self.usage(self.meter.rate())
        used = self.usage(images_per_second)
        self.tell("step", StepRecord(step, epoch, metrics, rate, images_per_second, data_wait, ended, used))

    def validate(self, step: int, state: TrainState, *, saved: bool) -> None:
        """Where it is due. The figures belong to the step's checkpoint, if there is one."""
        if self.evaluator is None or not self.plan.evaluates(step):
            return
        begin, epoch, total = time.perf_counter(), self.plan.epoch(step), self.evaluator.num_examples

        def tell(metrics: Mapping[str, float], seen: int) -> None:
            seconds = time.perf_counter() - begin
            self.tell("evaluation", EvaluationRecord(step, epoch, metrics, seen, total, seconds))

        def leave_if_asked() -> None:
            if self.should_stop(step):
                if not saved:
                    self._save(step, state)
                self._leave(step)

        # Padding is never counted, so an evaluation in progress cannot be mistaken for a finished one.
        self.validation = self.evaluator(state, lambda means, seen: tell(means, min(seen, total - 1)), leave_if_asked)
        tell({name: value for name, value in self.validation.items() if name != "count"}, total)
        if self.checkpoints and saved:
            self.checkpoints.validated(step, self.validation)
        self.meter.resume()
