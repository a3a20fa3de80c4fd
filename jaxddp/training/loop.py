"""The only training loop."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import jax

import jaxddp.training.events as events
from jaxddp.config.goal import VAL, VAL_EMA, flat
from jaxddp.core.errors import JaxddpError, NonFiniteError, Preempted
from jaxddp.core.phases import at_step, doing, phase, worked, working
from jaxddp.engine.parts.part import measured_states, rate_factor
from jaxddp.engine.state import TrainState
from jaxddp.measure.cost import MeanCost
from jaxddp.measure.profile import Profile
from jaxddp.training.device_memory import Memory
from jaxddp.training.epoch_sums import Clock, EpochSums, TooManySkipped
from jaxddp.training.evaluation import predicted
from jaxddp.training.listeners.notifier import Notifier
from jaxddp.training.run import Chunk, Run


@working()
@phase("training", "")
def fit(run: Run) -> TrainState:
    """Train from the run's state to its plan's last step, and return the last state.

    For each chunk of steps (often a single step) it does the following, in this order:

    1. Take the chunk's batches; `data_wait_fraction` is the share of time spent here. Before the first step, test the
       averaged gradient of the first batch.
    2. Dispatch the steps, and the meeting of the devices if it is due; the host does not wait for them.
    3. If a record is due (by the log cadence, at the end of an epoch, or because 4 or 5 is due): fetch the sums of all
       steps since the last record, stop if a loss is not finite, and call the listeners. If only a stop is due, the
       listeners are not called, because an uninterrupted run has no record at this step. A listener can end the run
       (`StopTraining`): 4 and 5 are then due.
    4. If a checkpoint is due, or the run was asked to stop: save a checkpoint. Compare the replicas before each save,
       and at the cadence of the plan.
    5. If validation is due: evaluate, predict the images that listeners request, call the listeners, and write the
       metrics beside the checkpoint of 4. That checkpoint is saved first, so a failed validation does not lose it. If
       the run is asked to stop during validation, a checkpoint is saved; the resumed run begins with that validation.
    6. Pass the metrics of the validation to the parts of the step, which may change the state, and to early stopping,
       which may end the run. A checkpoint holds the state before these changes, so a resumed run makes them again.

    Raises:
        NonFiniteError: a loss or the state is not finite, or too many steps in a row have no finite gradient. The
            state after such a step is not saved.
        GradientError: the averaged gradient of the devices is wrong; no step was taken.
        ReplicaError: the devices hold different states. These states are not saved.
        InputError: the step does not fit the devices' memory (checked before the first step), the memory runs out
            later, or more images were substituted than the plan allows.
        Preempted: `run.should_stop` returned True; the state was saved.
    """
    loop, state = _Loop(run), run.state
    plan, done = run.plan, loop.step
    try:
        loop.notifier.start(run.start())
        state = loop.begin(done, state)
        at_step(done)
        with phase("start", "opening the data"):
            stream = run.chunks(done)
        profile = run.profile if run.topology.peers.is_first else None
        with loop.memory.during_steps(), Profile(profile, plan.traced(done), loop.clock.paused) as traced:
            while done < plan.total_steps and not (loop.early_stopping.stops or loop.listener_reason):
                chunk = loop.next_chunk(stream, state)  # 1
                with traced.step(done + 1, state):
                    state = loop.dispatch(done, chunk, state)  # 2
                done += chunk.steps
                at_step(done)
                traced.done(done, state)
                if plan.is_last(done) and run.own_statistics:
                    with phase("device", "computing statistics of the averaged parameters"):
                        jax.block_until_ready(state)  # The steps that the devices still compute are training time.
                        with loop.clock.paused():
                            state = run.own_statistics(state)
                loop.record_and_save(done, state)  # 3, 4
                measured = loop.validate(done, state)  # 5
                state = loop.apply_validation(done, state, measured)  # 6
        if run.checkpoints:
            run.checkpoints.wait()
    except BaseException as error:
        loop.notifier.fail(loop.run_end(*events.ending_of(error), loop.used), error)
        raise
    status, reason = ("done", "") if done >= plan.total_steps else ("stopped", loop.stop_reason())
    with doing("finishing logs"):
        loop.notifier.end(loop.run_end(status, reason, run.usage(loop.clock.rate(), loop.work.mean())))
    return run.way.result(state)


_EARLY_STEPS = 10
"""The number of steps after which the speed is reported, if no step was logged before."""


class _Loop:
    """The variables of one call of `fit`, apart from the training state."""

    def __init__(self, run: Run):
        self.run, self.plan, self.peers = run, run.plan, run.topology.peers
        self.checkpoints, saved = run.checkpoints, run.progress
        self.clock = Clock(run.plan.batch_size, saved.get("epoch_seconds", 0.0))
        self.way, self.sums = run.way, EpochSums(run)
        self.memory, self.notifier = Memory(run), Notifier(run.listeners, self.peers)
        self.work, self._recent = MeanCost(), MeanCost()
        self.early_stopping = run.early_stopping.restored(saved.get("judgement"))
        self.step, self.used, self.logged = int(run.state.step), events.UNKNOWN, saved.get("logged")
        # The metrics of the last validation by split, with `count`.
        self.last: dict[str, Mapping[str, float]] = {}
        self._saved_step, self._predictor, self.listener_reason = self.step, run.predictor, ""
        self._untested, self._logged_once = run.self_test, False
        self._early_step: int | None = self.step + _EARLY_STEPS

    def run_end(self, status: events.Status, reason: str, used: events.Usage) -> events.RunEnd:
        """Return the record of the run's end for the listeners."""
        metrics, averaged = self.last.get(VAL, {}), self.last.get(VAL_EMA, {})
        return events.RunEnd(status, self.step, worked(), metrics, reason, used, averaged)

    def stop_reason(self) -> str:
        """Return the reason for the end of the run before its last step; that of early stopping has advice."""
        if self.listener_reason:
            return self.listener_reason
        best = self.checkpoints and self.checkpoints.best()
        note = "" if best in (None, self.early_stopping.step) else f"; the best checkpoint is step {best}"
        reason = f"{self.early_stopping.reason}{note}"
        return f"{reason}; to continue, give a larger train.stop_after or another train.duration"

    def begin(self, step: int, state: TrainState) -> TrainState:
        """Return the state for the first step. A resumed run first does points 5 and 6 of `fit` for its checkpoint."""
        measured = self.validate(step, state) if self.run.validated is None else self.run.validated
        state = self.apply_validation(step, state, measured or None)
        if self.early_stopping.stops and self.run.progress.get("total_steps") not in (None, self.plan.total_steps):
            self.early_stopping = replace(self.early_stopping, without_gain=0)
        return state

    def next_chunk(self, stream: Iterator[Chunk], state: TrainState) -> Chunk:
        """Return the next chunk (point 1 of `fit`). Test the gradient on the first chunk, also of a resumed run."""
        with self.clock.waiting_for_data():
            chunk = next(stream)
        if self._untested:
            with self.clock.paused(), phase("compile", "testing the averaged gradient"):
                self._untested(self.way.whole(state), *chunk.feed)
        self._untested = None
        self.compile(state, chunk)
        return chunk

    def dispatch(self, done: int, chunk: Chunk, state: TrainState) -> TrainState:
        """Dispatch a chunk after `done` steps (point 2 of `fit`), and return the state after the chunk."""
        self.memory.step = done + chunk.steps
        with phase("dispatch"):
            state, sums = self.run.program(state, *chunk.feed)
        self.clock.count_dispatch(chunk.steps, sums.values)
        for work in (self.work, self._recent):
            work.add(chunk.steps, self.run.program.cost)
        self.sums.add(range(done + 1, done + chunk.steps + 1), sums)
        if self.plan.syncs(done + chunk.steps):
            with phase("dispatch"):
                state = self.way.meet(state)
        return state

    def compile(self, state: TrainState, chunk: Chunk) -> None:
        """Compile the program for a chunk if needed.

        Before the first chunk, check that the program fits the devices' memory, also for the run's largest images.
        """
        growth, first = self.run.growth, not self.memory.is_checked
        feeds = [chunk.feed, growth.largest(chunk.feed)] if first and growth else [chunk.feed]
        for needed in feeds:
            if first or not self.run.program.is_ready(*needed):
                # The steps that the devices still compute are training time; compiling is not.
                with phase("device"):
                    jax.block_until_ready(state)
                with self.clock.paused(), phase("compile", "compiling the step"):
                    self.run.program.prepare(state, *needed)
                    self.way.prepare_meeting(state)
            if first:
                self.memory.check(state, chunk.feed)
        if first:
            # The time before the first step is not training time.
            self.clock.resume()

    def record_and_save(self, step: int, state: TrainState) -> None:
        """Record, compare the replicas, save and stop, each if it is due (points 3 and 4 of `fit`)."""
        stop, saves = self.run.should_stop(step), self.plan.saves(step)
        validates = self.run.evaluator is not None and self.plan.evaluates(step)
        before, self.step = self.step, step
        if self.plan.logs(step) or saves or validates:
            self.record(step, state)
        elif stop:
            self.fetch(state)
        elif self._early_step is not None and step >= self._early_step:
            self._report_early(step, state)
        saves = saves or stop or bool(self.listener_reason)
        if self.plan.replicas.due(step, before) or (saves and self.checkpoints):
            self._compare(step, state)
        if saves:
            self._save(step, state)
        if stop and (validates or not self.plan.is_last(step)):
            self._stop(step)

    def _report_early(self, step: int, state: TrainState) -> None:
        """Report the speed once, because the first record may be far away. A record before it makes it unnecessary."""
        self._early_step = None
        with phase("device"):
            jax.block_until_ready(state)
        left = self.plan.validations_from(step) if self.run.evaluator else 0
        rates = self.clock.early_rates()
        record = events.StepRecord(step, self.plan.epoch(step), {}, None, *rates, validations_left=left)
        self.notifier.notify("first_steps", record)

    def _compare(self, step: int, state: TrainState) -> None:
        if self.run.replicas:
            with phase("device"):
                jax.block_until_ready(state)
                with self.clock.paused():
                    self.run.replicas.check(step, state)

    def _save(self, step: int, state: TrainState) -> None:
        self._saved_step = step
        if self.checkpoints:
            progress = self.sums.saved | {"epoch_seconds": self.clock.epoch_seconds, "logged": self.logged}
            progress |= {"judgement": self.early_stopping.saved(), "total_steps": self.plan.total_steps}
            with doing(f"saving step {step:,}"):
                self.checkpoints.save(step, state, progress)
        self.clock.resume()

    def _stop(self, step: int) -> None:
        if self.checkpoints:
            self.checkpoints.wait()
        raise Preempted(f"asked to stop: saved step {step} of {self.plan.total_steps}; the same command resumes it")

    def fetch(self, state: TrainState) -> tuple[dict[str, float], float, float]:
        """Return the last step's metrics and the clock's rates; add the steps so far to the epoch's sums and time."""
        try:
            metrics = self.sums.fetch()
        except JaxddpError as error:
            # The sums of several steps are fetched together. The run ends with the step of the error.
            self.step = self.sums.step
            if not isinstance(error, TooManySkipped):
                raise
            raise NonFiniteError(error.problem, f". {self.run.suspects(self.way.whole(state), self.step)}") from error
        rates = self.clock.rates()
        self.used = self.run.usage(self.clock.rate(), self.work.mean())
        return metrics, *rates

    def record(self, step: int, state: TrainState) -> None:
        metrics, speed, wait = self.fetch(state)
        run, plan, rate_of = self.run, self.plan, self.run.learning_rate
        epoch_end = None
        if plan.epochs.due(step):
            epoch_end = events.EpochMetrics(plan.epochs.count(step), self.sums.end_epoch(), self.clock.end_epoch())
        used, self._recent = run.usage(speed, self._recent.mean()), MeanCost()
        side = run.growth and run.growth.side(step - 1)
        left = plan.validations_from(step) if run.evaluator else 0
        # At the first record the rate is compiled, and listeners import libraries: seconds that are not training time.
        with nullcontext() if self._logged_once else self.clock.paused():
            rate = rate_of and float(rate_of(step - 1)) * rate_factor(run.parts, state)
            record = events.StepRecord(step, plan.epoch(step), metrics, rate, speed, wait, epoch_end, used, side, left)
            self.notifier.notify("step", record)
            self.listener_reason = self.notifier.reason_to_stop()
        self._early_step, self._logged_once = None, True
        self.logged = {"step": step, "loss": float(metrics["loss"])}

    def validate(self, step: int, state: TrainState) -> Mapping[str, float | None] | None:
        """Validate if due (point 5 of `fit`). Returns the `flat` metrics; None if no validation is due."""
        evaluator = self.run.evaluator
        if evaluator is None or not (self.plan.evaluates(step) or self.listener_reason):
            return None

        def save() -> None:
            if self._saved_step != step:
                self._compare(step, state)
                self._save(step, state)

        def stop_if_requested() -> None:
            if self.run.should_stop(step):
                save()
                self._stop(step)

        with self.memory.during_validation(step):
            whole, records = self.way.whole(state), list[events.EvaluationRecord]()
            checked = replace(evaluator, step=self.memory.checked(evaluator.step))
            for split, each in measured_states(whole, self.run.parts).items():
                begun = events.EvaluationRecord(step, self.plan.epoch(step), {}, 0, evaluator.num_examples, 0.0, split)
                records.append(checked.evaluate(each, begun, self.notifier.notify, stop_if_requested))
        self.last = {record.split: record.metrics for record in records}
        measured = {name: float(value) for name, value in flat(self.last).items()}
        # The user's metrics may differ between processes, but all processes must stop at the same step.
        metrics = self.peers.from_first("validation metrics", lambda: measured)
        self.early_stopping.check(metrics)
        after = self.early_stopping.after(step, metrics)
        # The run ends some validations after its best one, whose state no later checkpoint holds.
        if after.stops or (after.stop_after is not None and after.step == step):
            save()
        predictions = self._predictor and predicted(self._predictor, whole)
        # After a failure, no more images are predicted.
        self._predictor = predictions and self._predictor
        records[-1] = replace(records[-1], predictions=predictions)
        for record in records:
            shown = {name: value for name, value in record.metrics.items() if name != "count"}
            self.notifier.notify("evaluation", replace(record, metrics=shown))
        self.listener_reason = self.notifier.reason_to_stop()
        if self.listener_reason:
            save()
        if self.checkpoints:
            self.checkpoints.validations.put(step, metrics)
        return metrics

    def apply_validation(self, step: int, state: TrainState, metrics: Mapping[str, float | None] | None) -> TrainState:
        """Update early stopping and the state with the metrics (point 6 of `fit`); return the next step's state."""
        if metrics is not None:
            self.early_stopping = self.early_stopping.after(step, metrics)
            state = self.run.follow(state, metrics)
            self.clock.resume()
        return state
