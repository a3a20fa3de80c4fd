"""The only training loop."""

import json
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax

from jaxddp.engine.following import rate_factor
from jaxddp.engine.state import TrainState
from jaxddp.errors import THEN, NonFiniteError, Preempted
from jaxddp.goal import VAL, VAL_EMA, flat
from jaxddp.measure.cost import Work
from jaxddp.measure.profile import Profile
from jaxddp.own_code import is_ctrl_c
from jaxddp.phases import at_step, doing, phase
from jaxddp.training.clock import Clock
from jaxddp.training.device_memory import Memory
from jaxddp.training.epoch_sums import EpochSums
from jaxddp.training.events import UNKNOWN, EpochMetrics, RunEnd, Status, StepRecord, Used, reason_of, status_of
from jaxddp.training.measuring import Measuring
from jaxddp.training.run import Run
from jaxddp.training.skipped_steps import SkippedSteps, TooManySkipped


@phase("training", "")
def fit(run: Run) -> TrainState:
    """Train from the run's state to its plan's last step, and return the last state.

    The order of operations, for each chunk of steps, of which there is often but one:

    1. take what its steps are fed with (time spent here is `data_wait_fraction`), and before the first step test the
       averaged gradient of it;
    2. dispatch them; the host does not wait for them;
    3. where a record is due (the log cadence, an epoch's end, anything of 4 or 5): fetch the sums of all steps since,
       stop if a loss is not finite, tell the listeners. Where only a stop is, they hear nothing: the run that nobody
       stops has no record there;
    4. where a checkpoint is due, or the run was asked to stop: save. Before it, and where the plan says so, compare the
       replicas;
    5. where validation is due: evaluate, predict the images that listeners want to show, tell them, put the metrics
       beside the checkpoint of 4. If it fails, that checkpoint is there; if the run is asked to stop meanwhile, one is
       saved. A resumed run validates it first;
    6. judge by those metrics: parts of the step may follow them, and the run may end. A checkpoint is of before its
       validation, so a resumed run judges again.

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
        state = loop.begin(done, state)
        at_step(done)
        with phase("start", "opening the data"):
            stream = run.chunks(done)
        profile = run.profile if run.topology.peers.is_first else None
        with loop.memory.of_steps(), Profile(profile, plan.traced(done), loop.clock.paused) as traced:
            while done < plan.total_steps and not loop.judgement.stops:
                with loop.clock.waiting_for_data():
                    chunk = next(stream)
                loop.test(state, *chunk.feed)
                loop.compile(state, chunk.feed)
                loop.memory.step = done + chunk.steps
                with traced.step(done + 1, state), phase("dispatch"):
                    state, sums = run.program(state, *chunk.feed)
                loop.clock.dispatched(chunk.steps, sums.values)
                loop.count(chunk.steps)
                loop.sums.add(range(done + 1, done + chunk.steps + 1), sums)
                done += chunk.steps
                at_step(done)
                traced.done(done, state)
                state = loop.end_step(done, state)
        if run.checkpoints:
            run.checkpoints.wait()
    except BaseException as error:
        status = status_of(error)
        seconds = time.perf_counter() - begin
        loop.fail(loop.ended(status, seconds, reason_of(error), loop.used), error)
        raise
    status, reason = ("done", "") if done >= plan.total_steps else ("stopped", loop.why_stopped())
    used = run.usage(loop.clock.rate(), loop.work.mean())
    with doing("finishing logs"):
        loop.tell("end", loop.ended(status, time.perf_counter() - begin, reason, used))
    return state


class _Loop:
    """What one call of `fit` keeps between steps, beside the state."""

    def __init__(self, run: Run):
        self.run, self.plan, self.peers = run, run.plan, run.topology.peers
        self.clock = Clock(run.plan.batch_size, run.progress.get("epoch_seconds", 0.0))
        self.skipped = SkippedSteps(run.plan.max_bad_steps, run.progress.get("skipped_in_a_row", 0), self.peers)
        self.sums = EpochSums(run.progress.get("epoch_values", 0.0), run.plan.max_substituted, self.skipped)
        self.memory = Memory(run)
        self.work, self._recent = Work(), Work()
        self.listeners: list[Any] = []
        self.judgement = run.judgement.restored(run.progress.get("judgement"))
        self.measure = Measuring(run, self.tell)
        self.step, self.used, self.logged = int(run.state.step), UNKNOWN, run.progress.get("logged")
        self._untested, self._told = run.self_test, False

    def start(self) -> None:
        """Only those that started hear of the rest."""
        # What one process prints and writes, all would print and write.
        listeners = self.run.listeners if self.peers.is_first else ()
        record = self.run.start()
        with phase("listeners", "opening logs"):
            for listener in listeners:
                getattr(listener, "start", _ignore)(record)
                self.listeners.append(listener)

    def tell(self, moment: str, record: Any) -> None:
        with phase("listeners"):
            for listener in self.listeners:
                getattr(listener, moment, _ignore)(record)

    def fail(self, record: RunEnd, error: BaseException) -> None:
        """Tell all listeners of the end; one that fails at it must not hide the reason of it."""
        with phase("listeners"):
            for listener in self.listeners:
                try:
                    getattr(listener, "end", _ignore)(record)
                except BaseException as another:
                    if is_ctrl_c(another):
                        raise
                    error.add_note(f"{THEN} {type(listener).__name__}.end failed: {another}")

    def ended(self, status: Status, seconds: float, reason: str, used: Used) -> RunEnd:
        """How the run ended, as listeners are told."""
        last = self.measure.last
        return RunEnd(status, self.step, seconds, last.get(VAL, {}), reason, used, last.get(VAL_EMA, {}))

    def why_stopped(self) -> str:
        """Why the run ends before its last step, and what goes on."""
        best = None if self.run.checkpoints is None else self.run.checkpoints.best()
        kept = "" if best in (None, self.judgement.step) else f"; the best checkpoint is step {best}"
        return f"{self.judgement.reason}{kept}; a larger stop_after or another duration goes on"

    def begin(self, step: int, state: TrainState) -> TrainState:
        """The state that the first step takes: of a resumed run, what follows from the validation of its checkpoint."""
        measured = self.run.validated
        if measured is None:
            state = self.validate(step, state, saved=True)
        elif measured:
            state = self.judge(step, state, measured)
        if self.judgement.stops and self.run.progress.get("total_steps") not in (None, self.plan.total_steps):
            self.judgement = self.judgement.patient()
        return state

    def test(self, state: TrainState, *feed: Any) -> None:
        """Before the first step of this run, which may be a resumed one."""
        test, self._untested = self._untested, None
        if test:
            with self.clock.paused(), phase("compile", "testing the averaged gradient"):
                test(state, *feed)

    def compile(self, state: TrainState, feed: tuple[Any, ...]) -> None:
        """What takes a chunk. Before the first one it has to fit, and so has what takes the largest images."""
        growing, first = self.run.growing, not self.memory.is_known
        for needed in (feed, growing.largest(feed)) if first and growing else (feed,):
            if first or not self.run.program.is_ready(*needed):
                # What the devices still compute meanwhile is training time, and compiling is not.
                with phase("device"):
                    jax.block_until_ready(state)
                with self.clock.paused(), phase("compile", "compiling the step"):
                    self.run.program.prepare(state, *needed)
            if first:
                self.memory.check(state, feed, needed)

    def count(self, steps: int) -> None:
        """Steps that the program has just taken."""
        for work in (self.work, self._recent):
            work.add(steps, self.run.program.cost)

    def end_step(self, step: int, state: TrainState) -> TrainState:
        """The state that the next step takes."""
        stop = self.run.should_stop(step)
        due, validates = self.plan.saves(step), self.run.evaluator is not None and self.plan.evaluates(step)
        saves = due or stop
        if self.plan.logs(step) or due or validates:
            self.record(step, state)
        elif stop:
            self.fetch(state)
        if self.plan.compares(self.step, step) or (saves and self.run.checkpoints):
            self._compare(step, state)
        self.step = step
        if saves:
            self._save(step, state)
        if stop and (validates or not self.plan.last(step)):
            self._leave(step)
        return self.validate(step, state, saved=saves)

    def _compare(self, step: int, state: TrainState) -> None:
        if self.run.replicas:
            with phase("device"):
                jax.block_until_ready(state)
                with self.clock.paused():
                    self.run.replicas.check(step, state)

    def _save(self, step: int, state: TrainState) -> None:
        if self.run.checkpoints:
            told = {"epoch_values": self.sums.values, "epoch_seconds": self.clock.epoch_seconds}
            told["skipped_in_a_row"] = self.skipped.in_a_row
            told |= {"judgement": self.judgement.saved(), "total_steps": self.plan.total_steps}
            told["logged"] = self.logged
            with doing(f"saving step {step:,}"):
                self.run.checkpoints.save(step, state, told)
        self.clock.resume()

    def _leave(self, step: int) -> None:
        if self.run.checkpoints:
            self.run.checkpoints.wait()
        raise Preempted(f"asked to stop: saved step {step} of {self.plan.total_steps}; the same command resumes it")

    def fetch(self, state: TrainState) -> tuple[dict[str, float], float, float]:
        """The metrics of the last step, and the rates of the clock; the epoch's sums and seconds then include it."""
        try:
            metrics = self.sums.fetch()
        except TooManySkipped as error:
            raise NonFiniteError(f"{error}. {self.run.suspects(state, error.step)}") from error
        rates = self.clock.rates()
        self.used = self.run.usage(self.clock.rate(), self.work.mean())
        return metrics, *rates

    def record(self, step: int, state: TrainState) -> None:
        metrics, images_per_second, data_wait = self.fetch(state)
        ended = None
        if self.plan.epochs.due(step):
            ended = EpochMetrics(self.plan.epochs.count(step), self.sums.end_epoch(), self.clock.end_epoch())
        rate = None
        if self.run.learning_rate is not None:
            rate = float(self.run.learning_rate(step - 1)) * rate_factor(self.run.parts, state)
        epoch = self.plan.epoch(step)
        used, self._recent = self.run.usage(images_per_second, self._recent.mean()), Work()
        side = None if self.run.growing is None else self.run.growing.side(step - 1)
        record = StepRecord(step, epoch, metrics, rate, images_per_second, data_wait, ended, used, side)
        # At the first one listeners open their files, some after an import that takes seconds.
        with nullcontext() if self._told else self.clock.paused():
            self.tell("step", record)
        self._told, self.logged = True, {"step": step, "loss": float(metrics["loss"])}

    def validate(self, step: int, state: TrainState, *, saved: bool) -> TrainState:
        """Where it is due. The metrics belong to the step's checkpoint, if there is one. Returns the state to go on."""
        evaluator = self.run.evaluator
        if evaluator is None or not self.plan.evaluates(step):
            return state

        def save() -> None:
            if not saved:
                self._compare(step, state)
                self._save(step, state)

        def leave_if_asked() -> None:
            if self.run.should_stop(step):
                save()
                self._leave(step)

        with self.memory.of_validation(step):
            records = self.measure(evaluator, step, state, leave_if_asked)
        measured = flat(self.measure.last)
        # What users measure may differ from process to process, and all must judge alike.
        told = self.peers.from_first("what validation measured", lambda: json.dumps(measured, default=float))
        metrics = json.loads(told)
        self.judgement.check(metrics)
        if self.judgement.after(step, metrics).stops:
            save()
        records[-1] = replace(records[-1], predictions=self.measure.predictions(state))
        for record in records:
            self.tell("evaluation", record)
        if self.run.checkpoints:
            self.run.checkpoints.validations.put(step, metrics)
        return self.judge(step, state, metrics)

    def judge(self, step: int, state: TrainState, metrics: Mapping[str, float | None]) -> TrainState:
        """What follows from a validation: whether the run stops, and the state to go on."""
        self.judgement, following = self.judgement.after(step, metrics), self.run.follow(state, metrics)
        self.clock.resume()
        return following


def _ignore(record: Any) -> None:
    """For the moments that a listener has no method for."""
