"""Exact evaluation: every example is evaluated once, the last batch is padded and masked, and the count is checked.

A validation of a run also reports its progress to listeners, predicts a few images, the same each time, and decides
about early stopping.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P

from jaxddp.config import CheckpointConfig, DataConfig
from jaxddp.config.goal import Goal, Mean, is_averaged
from jaxddp.core.errors import InputError, counted, figure, first_line, listed, plural, speed
from jaxddp.core.phases import doing, moved, phase, reached, running_time
from jaxddp.data.batch import Batch
from jaxddp.data.order import ChosenOrder, Shard
from jaxddp.data.source import Source
from jaxddp.engine.objective import MetricSums, Objective, SetSums, finish_metrics, targets
from jaxddp.engine.state import TrainState
from jaxddp.mesh import AXIS, Topology
from jaxddp.training.events import EvaluationRecord, PredictedImages

# More frequent reports would make the devices wait for the host.
_REPORT_SECONDS = 0.5
_BATCHES_IN_FLIGHT = 4
_SAVED = ("best", "step", "without_gain")
"""The numbers of early stopping that a checkpoint holds, besides the goal and the mean."""
_log = logging.getLogger("jaxddp.training")
Measure = Callable[[TrainState], Mapping[str, float]]
"""A function of the user that computes further metrics of a state."""
Report = Callable[[Mapping[str, float], int], None]
"""A function that is called during an evaluation with the means and the number of examples so far."""


@dataclass(frozen=True)
class Evaluator:
    """Evaluates a state over a whole split of `num_examples`.

    Attributes:
        step: returns the metric sums of a batch, or of several batches, stacked.
        batches: returns a new iterator at each call. It yields the step's arguments after the state, placed on the
            devices.
        extra: further functions of the state, whose metrics are added.
        metrics: the metrics by name; those over the whole set are computed after the last batch.
        references: the evaluator of other images, whose arrays a metric over the set finds as `references`.
    """

    step: Callable[..., MetricSums]
    batches: Callable[[], Iterator[tuple[Any, ...]]]
    num_examples: int
    extra: Sequence[Measure] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)
    references: "Evaluator | None" = None

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Return the metrics of a state over the split."""
        return self.measure(state)[0]

    @phase("validation")
    def measure(
        self, state: TrainState, report: Report | None = None, between: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Measure a state over the split.

        Returns:
            All metrics by name (means over the examples, and metrics over the whole set), with `count`, the number of
            examples; and the arrays from which each metric over the whole set was computed, by its name, see
            `jaxddp.engine.objective`.

        Args:
            report: called from time to time with the means and the number of examples so far.
            between: called between two dispatches, equally often by all processes; an error ends the evaluation.

        Raises:
            RuntimeError: the batches did not hold `num_examples` examples.
        """
        with doing("validating", self.num_examples, "image"):
            totals, sets = self._totals(state, report, between)
            if self.references is not None:
                of_others = self.references.measure(state, between=between)[1]
                sets = {name: {**found, "references": of_others[name]} for name, found in sets.items()}
            metrics = {**totals.means(), **finish_metrics(self.metrics, sets), "count": self.num_examples}
            for measure in self.extra:
                more = measure(state)
                if repeated := sorted(more.keys() & metrics.keys()):
                    raise InputError(f"evaluators: {repeated[0]} is measured already; give it another name")
                metrics |= more
        return metrics, sets

    def _totals(
        self, state: TrainState, report: Report | None, between: Callable[[], None]
    ) -> tuple[MetricSums, dict[str, Any]]:
        """Return the sums over all examples, and the arrays of the metrics over the whole set; see `measure`."""
        totals: Any = None
        set_sums, in_flight = SetSums(), deque[MetricSums]()
        begin = last_report = time.perf_counter()

        def finish(left: int) -> None:
            """Add the sums of all but the last `left` calls of the step, in float64: counts are exact above 2^24."""
            nonlocal totals
            while len(in_flight) > left:
                sums = in_flight.popleft()
                with phase("device"):
                    values = jax.device_get(sums.values).astype(np.float64)
                # Batch by batch, so the result has the same bits for any number of batches in a call.
                totals = sums.replace(values=sum(values, 0 if totals is None else totals.values), sets={})
                set_sums.add(sums.sets)

        for number, feed in enumerate(self.batches()):
            moved()
            if number:
                between()
            with nullcontext() if number else phase("compile", "compiling validation"):
                sums = self.step(state, *feed)
            begin = begin if number else time.perf_counter()
            stacked = sums.values.ndim == 3
            in_flight.append(sums if stacked else jax.tree.map(lambda each: each[None], sums))
            finish(1 if stacked else _BATCHES_IN_FLIGHT)
            if time.perf_counter() - last_report > _REPORT_SECONDS:
                finish(0)
                seen = totals.count()
                reached(seen, f"{speed(seen / (time.perf_counter() - begin))} images/s")
                if report:
                    report(totals.means(), seen)
                last_report = time.perf_counter()
        finish(0)
        seen = 0 if totals is None else totals.count()
        if totals is None or seen != self.num_examples:
            raise RuntimeError(f"evaluation saw {seen} examples of {self.num_examples}")
        return totals, set_sums.results()

    def evaluate(
        self, state: TrainState, begun: EvaluationRecord, notify: Callable[..., None], between: Callable[[], None]
    ) -> EvaluationRecord:
        """Evaluate a state, and return the record of the finished evaluation, with `count` among its metrics.

        Args:
            begun: the record before the first example.
            notify: called as `notify("evaluation", record)` while the evaluation is in progress.
            between: see `measure`.
        """
        begin = running_time()

        def report(means: Mapping[str, float], seen: int) -> None:
            # `seen == total` would mark the record as final, but after the last batch metrics are still computed.
            seen, seconds = min(seen, begun.total - 1), running_time() - begin
            notify("evaluation", replace(begun, metrics=means, seen=seen, seconds=seconds))

        metrics, sets = self.measure(state, report, between)
        return replace(begun, metrics=metrics, seen=begun.total, seconds=running_time() - begin, sets=sets)


@dataclass(frozen=True)
class ImagePredictor:
    """The predictor of a few images of a source. All processes call it together, and each process gets all predictions.

    The images are read and cropped as for evaluation, once, at the first call.

    Attributes:
        program: see `jaxddp.engine.predictions.make_classify`.
        rows: int[n], the rows of the images in the source.
        max_batch_size: the largest number of images in a batch; a multiple of the number of devices.
    """

    program: Callable[[TrainState, Batch], tuple[Any, Any]]
    source: Source
    rows: np.ndarray
    data: DataConfig
    topology: Topology
    max_batch_size: int

    def __call__(self, state: TrainState) -> PredictedImages:
        """Return the predictions of a state. Raises: see `batches`."""
        shard = Shard.of_process(self.topology.peers)
        placed = (self.topology.place(jax.tree.map(shard.of, batch)) for batch in self.batches)
        outputs = [self.program(state, batch)[0] for batch in placed]

        def joined(*arrays: Any) -> np.ndarray:
            return np.concatenate([*map(np.asarray, arrays)])[: len(self.rows)]

        probabilities = joined(*outputs)
        images, labels = joined(*(batch.image for batch in self.batches)), self.source.labels[self.rows]
        best = probabilities.argmax(-1), probabilities.max(-1)
        return PredictedImages(images, labels, *best, self.source.class_names)

    @cached_property
    def batches(self) -> list[Batch]:
        """The batches of all images, on the host of every process. Raises: InputError if an image cannot be used."""
        count, devices = len(self.rows), self.topology.num_devices
        batch_size = min(self.max_batch_size, -(-count // devices) * devices)
        order = ChosenOrder(len(self.source), batch_size, chosen=tuple(self.rows.tolist()))
        return [*self.source.eval_batches(order, self.data)]


def predicted(predictor: ImagePredictor, state: TrainState) -> PredictedImages | None:
    """Return the predictions of the images that listeners request; None after a failure, which is logged in one line.

    If one process cannot read the images, no process computes predictions, because all must compute them together.
    """
    peers, fault = predictor.topology.peers, ""
    try:
        _ = predictor.batches
    except InputError as error:
        fault = first_line(error)
    fault = next(filter(None, peers.exchange("images to show", fault)), "")
    try:
        if not fault:
            return predictor(state)
    except jax.errors.JaxRuntimeError as error:
        # After an error of one device, the other processes wait for it.
        if not peers.is_alone:
            raise
        fault = first_line(error)
    _log.warning(f"the predictions to show failed ({fault}) and are left out from here on")
    return None


@dataclass(frozen=True)
class EarlyStopping:
    """The state of early stopping, a pure function of the run's validations in their order.

    Attributes:
        goal: the metric by which validations are compared.
        stop_after: the run ends after this many validations in a row without gain; None never ends it.
        min_gain: a validation is a gain if its value is better than `best` by more than `min_gain`.
        best, step: the value of the best validation, and its step; None and 0 before the first validation.
        without_gain: the number of validations since the last gain.
        mean: the smoothed value of the metric.
    """

    goal: Goal = field(default_factory=Goal)
    stop_after: int | None = None
    min_gain: float = 0.0
    best: float | None = None
    step: int = 0
    without_gain: int = 0
    mean: Mean = field(default_factory=Mean)

    def after(self, step: int, metrics: Mapping[str, float | None]) -> "EarlyStopping":
        """Return the state after a validation with `flat` metrics. A value that is not finite is no gain."""
        if self.goal.metric not in metrics:
            return self
        value, mean = metrics[self.goal.metric], self.mean
        if value is not None and math.isfinite(value):
            mean = mean.with_value(value, self.goal.smoothing)
            if self.best is None or self.goal.is_better(mean.value, self.best, self.min_gain):
                return replace(self, best=mean.value, step=step, without_gain=0, mean=mean)
        return replace(self, without_gain=self.without_gain + 1, mean=mean)

    def check(self, names: Collection[str]) -> None:
        """Check that the goal's metric is one of these `flat` metrics.

        The default goal is checked only if `stop_after` is set. Raises: InputError if the metric is missing. The error
        lists the metrics.
        """
        default = CheckpointConfig().goal(averages=any(map(is_averaged, names)))
        if self.goal != default or self.stop_after is not None:
            self.goal.check(names)

    @property
    def stops(self) -> bool:
        """Whether the run ends."""
        return self.stop_after is not None and self.without_gain >= self.stop_after

    @property
    def reason(self) -> str:
        """The reason for the end of the run, with the best validation."""
        count, smoothed = counted(self.without_gain, "validation"), "smoothed " if self.goal.smoothing else ""
        if self.best is None:
            return f"{self.goal.name} was not finite in {count}"
        since = f"since step {self.step}, where it was {figure(self.goal.metric, self.best)}"
        return f"no gain in {smoothed}{self.goal.name} in {count} {since}"

    def saved(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {"goal": self.goal.plain(), "mean": [*self.mean]} | {name: getattr(self, name) for name in _SAVED}

    def restored(self, saved: Mapping[str, Any] | None) -> "EarlyStopping":
        """Return the state with the values of `saved()`; this state if the values are None or of another goal."""
        if saved is None or saved["goal"] != self.goal.plain():
            return self
        return replace(self, mean=Mean(*saved["mean"]), **{name: saved[name] for name in _SAVED})


def describe_non_finite(
    state: TrainState, batch: Batch, rows: np.ndarray, objective: Objective, topology: Topology, key: jax.Array
) -> str:
    """Describe the rows of a training batch, int[B], whose loss is not finite.

    If all losses are finite, describe the rows whose image is not finite. If all images are finite too, describe all.

    The network is evaluated on the augmented images of the step with running statistics, so that an image does not
    affect the losses of other images. The state may belong to a later step. All processes must call this together.
    """

    def local(state: TrainState, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A network can hide the NaN of an image: in XLA's CPU compiler, max(NaN, 0), as in a ReLU, is 0.
        images = objective.preprocess(batch, train=True, key=key).images
        logits = objective.predict(state.params, state.model_state, images).astype(jnp.float32)
        losses, _ = objective.loss(logits, targets(batch.label, logits))
        return jnp.isfinite(images).all((1, 2, 3)), jnp.isfinite(losses)

    sharded = jax.shard_map(local, mesh=topology.mesh, in_specs=(P(), P(AXIS), P()), out_specs=P(AXIS))
    finite = map(np.asarray, jax.jit(sharded, out_shardings=topology.replicated)(state, batch, key))
    # Padding is not described.
    rows, images, losses = (each[rows >= 0] for each in (rows, *finite))
    if not losses.all():
        subject, bad = "The loss is not finite for", rows[~losses]
    elif not images.all():
        subject, bad = "Images are not finite after augmentation:", rows[~images]
    else:
        subject, bad = "Each image of the batch has a finite loss if it is evaluated alone; the batch is", rows
    return f"{subject} {plural(len(bad), 'row')} {listed(map(str, bad), most=8)} of the training data"
