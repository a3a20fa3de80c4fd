"""The only training loop."""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax

from jaxddp.engine.state import TrainState
from jaxddp.errors import THEN, InputError, NonFiniteError, Preempted
from jaxddp.measure.cost import Work
from jaxddp.measure.profile import Profile
from jaxddp.training.clock import Clock
from jaxddp.training.device_memory import Memory
from jaxddp.training.epoch_sums import EpochSums
from jaxddp.training.events import UNKNOWN, EpochMetrics, EvaluationRecord, RunEnd, StepRecord
from jaxddp.training.run import Run
from jaxddp.training.shown import Shown
from jaxddp.training.skipped_steps import SkippedSteps, TooManySkipped
from jaxddp.wording import first_line

_log = logging.getLogger("jaxddp.training")


def fit(run: Run) -> TrainState:
    """Train from the run's state to its plan's last step, and return the last state.

    The order of operations, for each chunk of steps, of which there is often but one:

    1. take what its steps are fed with (time spent here is `data_wait_fraction`), and before the first step test the
       averaged gradient of it;
    2. dispatch them; the host does not wait for them;
    3. where a record is due (the log cadence, an epoch's end, anything of 4 or 5): fetch the sums of all steps since,
       stop if a loss is not finite, tell the listeners;
    4. where a checkpoint is due, or the run was asked to stop: save. Before it, and where the plan says so, compare the
       replicas;
    5. where validation is due: evaluate, predict the images that listeners want to show, tell them, put the metrics
       beside the checkpoint of 4. If it fails, that checkpoint is there; if the run is asked to stop meanwhile, one is
       saved. A resumed run validates it first.

    Raises:
        NonFiniteError: a loss or the state is not finite, or the gradients of too many steps in a row. Nothing of it is
            saved.
        GradientError: the devices' averaged gradient is wrong, so no step is taken.
        ReplicaError: the devices hold different states. Nothing of them is saved.
        InputError: the step does not fit the devices, which is said before the first one, or their memory runs out
            later; or more images were substituted than the plan allows.
        Preempted: `run.should_stop` said so; the state was saved.
    """
    loop, state = _Loop(run), run.state
    plan, done, begin = run.plan, loop.step, time.perf_counter()
    try:
        loop.start()
        if not run.validated:
            loop.validate(done, state, saved=True)
        stream = run.chunks(done)
        profile = run.profile if run.topology.process_index == 0 else None
        with loop.memory.of_steps(), Profile(profile, plan.traced(done), loop.clock.paused) as traced:
            while done < plan.total_steps:
                with loop.clock.waiting_for_data():
                    chunk = next(stream)
                loop.test(state, *chunk.feed)
                loop.compile(state, chunk.feed)
                loop.memory.step = done + chunk.steps
                with traced.step(done + 1, state):
                    state, sums = run.program(state, *chunk.feed)
                loop.clock.dispatched(chunk.steps, sums.values)
                loop.count(chunk.steps)
                loop.sums.add(range(done + 1, done + chunk.steps + 1), sums)
                done += chunk.steps
                traced.done(done, state)
                loop.end_step(done, state)
        if run.checkpoints:
            run.checkpoints.wait()
    except BaseException as error:
        status = "preempted" if isinstance(error, Preempted) else "failed"
        seconds = time.perf_counter() - begin
        loop.fail(RunEnd(status, loop.step, seconds, loop.validation, str(error), loop.used), error)
        raise
    used = run.usage(loop.clock.rate(), loop.work.mean())
    loop.tell("end", RunEnd("done", loop.step, time.perf_counter() - begin, loop.validation, used=used))
    return state


class _Loop:
    """What one call of `fit` keeps between steps, beside the state."""

    def __init__(self, run: Run):
        self.run, self.plan = run, run.plan
        self.clock = Clock(run.plan.batch_size, run.progress.get("epoch_seconds", 0.0))
        self.skipped = SkippedSteps(run.plan.max_bad_steps, run.progress.get("skipped_in_a_row", 0))
        self.sums = EpochSums(run.progress.get("epoch_values", 0.0), run.plan.max_substituted, self.skipped)
        self.memory = Memory(run)
        self.work, self._recent = Work(), Work()
        self.listeners: list[Any] = []
        self.validation: Mapping[str, float] = {}
        self.step, self.used = int(run.state.step), UNKNOWN
        self._untested, self._predictor = run.self_test, run.predictor

    def start(self) -> None:
        """Only those that started hear of the rest."""
        # What one process prints and writes, all would print and write.
        listeners = self.run.listeners if self.run.topology.process_index == 0 else ()
        record = self.run.start()
        for listener in listeners:
            getattr(listener, "start", _ignore)(record)
            self.listeners.append(listener)

    def tell(self, moment: str, record: Any) -> None:
        for listener in self.listeners:
            getattr(listener, moment, _ignore)(record)

    def fail(self, record: RunEnd, error: BaseException) -> None:
        """Tell all listeners of the end; one that fails at it must not hide the reason of it."""
        for listener in self.listeners:
            try:
                getattr(listener, "end", _ignore)(record)
            except Exception as another:
                error.add_note(f"{THEN} {type(listener).__name__}.end failed: {another}")

    def test(self, state: TrainState, *feed: Any) -> None:
        """Before the first step of this run, which may be a resumed one."""
        test, self._untested = self._untested, None
        if test:
            with self.clock.paused():
                test(state, *feed)

    def compile(self, state: TrainState, feed: tuple[Any, ...]) -> None:
        """What takes a chunk. Before the first one it has to fit, and so has what takes the largest images."""
        growing, first = self.run.growing, not self.memory.is_known
        for needed in (feed, growing.largest(feed)) if first and growing else (feed,):
            if first or not self.run.program.is_ready(*needed):
                # What the devices still compute meanwhile is training time, and compiling is not.
                jax.block_until_ready(state)
                with self.clock.paused():
                    self.run.program.prepare(state, *needed)
            if first:
                self.memory.check(state, feed)

    def count(self, steps: int) -> None:
        """Steps that the program has just taken."""
        for work in (self.work, self._recent):
            work.add(steps, self.run.program.cost)

    def end_step(self, step: int, state: TrainState) -> None:
        stop = self.run.should_stop(step)
        saves = self.plan.saves(step) or stop
        validates = self.run.evaluator is not None and self.plan.evaluates(step)
        if self.plan.logs(step) or saves or validates:
            self.record(step, state)
        if self.plan.compares(self.step, step) or (saves and self.run.checkpoints):
            self._compare(step, state)
        self.step = step
        if saves:
            self._save(step, state)
        if stop and (validates or not self.plan.last(step)):
            self._leave(step)
        self.validate(step, state, saved=saves)

    def _compare(self, step: int, state: TrainState) -> None:
        if self.run.replicas:
            jax.block_until_ready(state)
            with self.clock.paused():
                self.run.replicas.check(step, state)

    def _save(self, step: int, state: TrainState) -> None:
        if self.run.checkpoints:
            progress = {"epoch_values": self.sums.values, "epoch_seconds": self.clock.epoch_seconds}
            progress["skipped_in_a_row"] = self.skipped.in_a_row
            self.run.checkpoints.save(step, state, progress)
        self.clock.resume()

    def _leave(self, step: int) -> None:
        if self.run.checkpoints:
            self.run.checkpoints.wait()
        raise Preempted(f"asked to stop: saved step {step} of {self.plan.total_steps}; the same command resumes it")

    def record(self, step: int, state: TrainState) -> None:
        try:
            metrics = self.sums.fetch()
        except TooManySkipped as error:
            raise NonFiniteError(f"{error}. {self.run.suspects(state, error.step)}") from error
        images_per_second, data_wait = self.clock.rates()
        ended = None
        if self.plan.epochs.due(step):
            ended = EpochMetrics(self.plan.epochs.count(step), self.sums.end_epoch(), self.clock.end_epoch())
        rate = None if self.run.learning_rate is None else float(self.run.learning_rate(step - 1))
        epoch = self.plan.epoch(step)
        self.used = self.run.usage(self.clock.rate(), self.work.mean())
        used, self._recent = self.run.usage(images_per_second, self._recent.mean()), Work()
        side = None if self.run.growing is None else self.run.growing.side(step - 1)
        self.tell("step", StepRecord(step, epoch, metrics, rate, images_per_second, data_wait, ended, used, side))

    def validate(self, step: int, state: TrainState, *, saved: bool) -> None:
        """Where it is due. The metrics belong to the step's checkpoint, if there is one."""
        evaluator = self.run.evaluator
        if evaluator is None or not self.plan.evaluates(step):
            return
        begin, epoch, total = time.perf_counter(), self.plan.epoch(step), evaluator.num_examples

        def measured(metrics: Mapping[str, float], seen: int) -> EvaluationRecord:
            return EvaluationRecord(step, epoch, metrics, seen, total, time.perf_counter() - begin)

        def report(means: Mapping[str, float], seen: int) -> None:
            # Padding is never counted, so an evaluation in progress cannot be mistaken for a finished one.
            self.tell("evaluation", measured(means, min(seen, total - 1)))

        def leave_if_asked() -> None:
            if self.run.should_stop(step):
                if not saved:
                    self._compare(step, state)
                    self._save(step, state)
                self._leave(step)

        with self.memory.of_validation(step):
            self.validation, sets = evaluator.measure(state, report, leave_if_asked)
            record = measured({name: value for name, value in self.validation.items() if name != "count"}, total)
        if self.run.checkpoints and saved:
            self.run.checkpoints.validations.put(step, self.validation)
        self.tell("evaluation", replace(record, predictions=self._predictions(state), sets=sets))
        self.clock.resume()

    def _predictions(self, state: TrainState) -> Shown | None:
        """Of the images that listeners want to show. As with loggers, what fails is said once and left out."""
        predictor = self._predictor
        try:
            return None if predictor is None else predictor(state)
        except (InputError, jax.errors.JaxRuntimeError) as error:
            self._predictor = None
            _log.warning(f"the predictions to show failed ({first_line(error)}) and are left out from here on")
            return None


def _ignore(record: Any) -> None:
    """For the moments that a listener has no method for."""
