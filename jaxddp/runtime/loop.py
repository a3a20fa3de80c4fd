"""The only training loop."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxddp.data.batch import Batch
from jaxddp.engine.objective import MetricSums
from jaxddp.engine.state import TrainState
from jaxddp.errors import Preempted
from jaxddp.runtime.checkpoint import Checkpoints
from jaxddp.runtime.evaluate import Evaluator
from jaxddp.runtime.meter import Meter
from jaxddp.runtime.plan import Plan
from jaxddp.runtime.profile import Profile
from jaxddp.runtime.records import EpochFigures, EvaluationRecord, Listener, RunEnd, RunStart, StepRecord, Used


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
    4. where validation is due: evaluate, tell the listeners;
    5. where a checkpoint is due, or the run was asked to stop: save, with the figures of 4 where they are of this step.

    Args:
        learning_rate: a schedule, 0 for the first step, to be shown.
        progress: as saved with the checkpoint that `state` was restored from.
        should_stop: asked after every chunk; all processes must answer alike.
        usage: how well the devices are used at a speed, for the records; see `jaxddp.runtime.usage`.
        profile: where a trace of the steps goes that the plan names; None for none.

    Raises:
        NonFiniteError: a loss or the state is not finite. Nothing of it is saved.
        InputError: more images than the plan allows had others stand in for them.
        Preempted: `should_stop` said so; the state was saved.
    """
    meter = Meter(plan.batch_size, progress, plan.max_substituted)
    run = _Run(plan, evaluator, checkpoints, learning_rate, meter, usage)
    done, begin = int(state.step), time.perf_counter()
    run.step = done
    try:
        run.start(listeners, start)
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
                run.end_step(done, state, stop=should_stop(done))
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
    ):
        self.plan, self.evaluator, self.checkpoints = plan, evaluator, checkpoints
        self.learning_rate, self.meter, self.usage = learning_rate, meter, usage
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

    def end_step(self, step: int, state: TrainState, *, stop: bool) -> None:
        evaluates = self.evaluator is not None and self.plan.evaluates(step)
        saves = self.plan.saves(step) or stop
        if self.plan.logs(step) or evaluates or saves:
            self.record(step)
        self.step = step
        if evaluates or saves:
            measured = self.evaluate(step, state, self.evaluator) if self.evaluator and evaluates else None
            if self.checkpoints and saves:
                self.checkpoints.save(step, state, self.meter.progress(), measured)
            self.meter.resume()
        if stop and not self.plan.last(step):
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

    def evaluate(self, step: int, state: TrainState, evaluator: Evaluator) -> Mapping[str, float]:
        begin, epoch = time.perf_counter(), self.plan.epoch(step)

        def report(metrics: Mapping[str, float], seen: int) -> None:
            # Padding is never counted, so an evaluation in progress cannot be mistaken for a finished one.
            partial = min(seen, evaluator.num_examples - 1)
            seconds = time.perf_counter() - begin
            self.tell("evaluation", EvaluationRecord(step, epoch, metrics, partial, evaluator.num_examples, seconds))

        self.validation = evaluator(state, report)
        figures = {name: value for name, value in self.validation.items() if name != "count"}
        seconds, total = time.perf_counter() - begin, evaluator.num_examples
        self.tell("evaluation", EvaluationRecord(step, epoch, figures, total, total, seconds))
        return self.validation
