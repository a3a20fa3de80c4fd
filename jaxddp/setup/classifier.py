"""A network for evaluation and prediction."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Views
from jaxddp.data.source import Source
from jaxddp.engine.example_loss import ExampleLoss
from jaxddp.engine.objective import Objective
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.setup.compiled_programs import CompiledPrograms
from jaxddp.training.evaluation import Evaluator, Measure


@dataclass(frozen=True)
class Classifier:
    """A network with the loss and the metrics of evaluation.

    Attributes:
        model: the network, adapted to the platform; see `jaxddp.models.adapt.for_platform`.
        loss: the loss without label smoothing.
        metrics: metrics in addition to the loss, by name.
        preprocess: turns pixels into the network's input.
        views: the views of an image whose logits are averaged, see `eval.views`.
        topology: the devices.
        programs: the cache of compiled programs.
    """

    model: Model
    loss: ExampleLoss
    metrics: Mapping[str, Any]
    preprocess: Preprocess
    views: Views
    topology: Topology
    programs: CompiledPrograms = field(default_factory=CompiledPrograms)

    def objective(self, metrics: Mapping[str, Any] | None = None) -> Objective:
        """Return the objective that measures a batch. `metrics` replaces the classifier's metrics if it is given."""
        return Objective(
            self.model, self.loss, self.preprocess, self.metrics if metrics is None else metrics, self.views
        )

    def evaluator(
        self,
        source: Source,
        batches: Callable[[], Iterator[tuple[Any, ...]]],
        metrics: Mapping[str, Any] | None = None,
        extra: Sequence[Measure] = (),
        *,
        resident: bool = False,
    ) -> Evaluator:
        """Return the evaluator of a labelled source, which measures each example once.

        Args:
            batches: returns an iterator over the source's batches on the devices. Each batch is in a tuple.
            metrics: metrics that replace the classifier's.
            extra: functions of the state that return further metrics.
            resident: whether the images are on the devices. If so, each tuple is (images, batches without images).
        """
        objective = self.objective(metrics)
        step = self.programs.evaluate(objective, self.topology, resident=resident)
        return Evaluator(step, batches, len(source), extra, objective.metrics)

    def classify(self) -> Callable[..., Any]:
        """Return the function (state, batch) -> predictions; see `jaxddp.engine.predictions.make_classify`."""
        return self.programs.classify(self.objective(), self.topology)
