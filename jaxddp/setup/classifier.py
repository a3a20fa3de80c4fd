"""A network as evaluation has it: what training validates by, what `eval` measures and what `predict` asks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Views
from jaxddp.data.source import Source
from jaxddp.engine.example_loss import ExampleLoss
from jaxddp.engine.step_objective import Objective
from jaxddp.mesh import Topology
from jaxddp.models.interface import Model
from jaxddp.setup.compiled_programs import Programs
from jaxddp.training.validation.evaluator import Evaluator, Measure


@dataclass(frozen=True)
class Classifier:
    """A network, and what evaluation measures of it.

    Attributes:
        model: as it is quickest on these devices.
        loss: without label smoothing.
        metrics: beside the loss, by name.
        preprocess: from pixels to the network's input.
        views: how many views of an image a prediction is the mean of, see `eval.views`.
    """

    model: Model
    loss: ExampleLoss
    metrics: Mapping[str, Any]
    preprocess: Preprocess
    views: Views
    topology: Topology
    programs: Programs = field(default_factory=Programs)

    def objective(self, metrics: Mapping[str, Any] | None = None) -> Objective:
        """What a batch is measured by; by its own metrics where none are given."""
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
        """Measures a source with its labels, each example once.

        Args:
            batches: of the source, placed, each in a tuple; or with images that are `resident` on the devices.
            metrics: in place of its own.
            extra: functions of the state, whose metrics join these.
        """
        objective = self.objective(metrics)
        step = self.programs.evaluate(objective, self.topology, resident=resident)
        return Evaluator(step, batches, len(source), extra, objective.metrics)

    def classify(self) -> Callable[..., Any]:
        """Of a state and a placed batch, see `jaxddp.engine.step.make_classify`."""
        return self.programs.classify(self.objective(), self.topology)
