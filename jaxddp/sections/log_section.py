"""The `log` section of a config: what a run logs, and where."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.ranges import Range
from jaxddp.overrides import names_of
from jaxddp.sections.layers import assignments

ShownImages = Annotated[int, Range(0, 256)]
"""The number of images in a picture."""
_TRACKERS = ("wandb", "mlflow")


@dataclass(frozen=True)
class LogConfig:
    """What is watched."""

    every: Duration = field(default_factory=lambda: Duration.parse("50 steps"))
    """How often a line of training is logged."""
    to: tuple[str, ...] = ("jsonl", "curves", "parameters", "tensorboard")
    """The loggers: "jsonl" writes metrics.jsonl and result.json, "curves" draws curves.png from it, "parameters" lists
    the network's in parameters.txt, "tensorboard" writes event files, "confusion" the last validation's confusion
    matrix into confusion.csv, "wandb" and "mlflow" tell Weights & Biases and MLflow, which each are an extra of the
    package. If one but "jsonl" fails, a line says so and the run goes on."""
    project: str | None = None
    """Of "wandb" its project, of "mlflow" its experiment. Where absent, what their environment says, else "jaxddp"."""
    name: str | None = None
    """What "wandb" and "mlflow" call the run; where absent, WANDB_NAME, else as the work directory is called."""
    config: tuple[str, ...] = ()
    """What they record beside the run's own config: "note=baseline,fold=3"."""
    images: ShownImages | None = None
    """Of how many validation images each evaluation's predictions are shown, by "wandb", "mlflow" and "tensorboard".
    Where absent, 16 if "wandb" or "mlflow" is named, and none otherwise."""
    guard_formulas: bool = False
    """In confusion.csv, write an apostrophe before the name of a class that a spreadsheet would take for a formula, as
    it begins with =, +, -, @, a tab or the end of a line. Names are written as they are otherwise."""
    gradient_norm: bool = False
    """Log the norm of the averaged gradient of each logged step, which a run with optimizer.clip_norm does anyway."""
    profile: Duration | None = None
    """Trace this much ("10 steps") for TensorBoard's profiler, from a few steps after the first on, into the work
    directory's profile/; nothing where absent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", names_of(self.to))
        object.__setattr__(self, "config", names_of(self.config))

    @cached_property
    def recorded(self) -> dict[str, str]:
        """What `config` says, by name. Raises: InputError; it says nothing."""
        return assignments(self.config, "log.config", "NAME")

    def check(self) -> None:
        """See that the loggers in `to` read what is said for some of them.

        Raises:
            InputError: a key that none of them reads or that says nothing, or curves without what they are drawn from.
        """
        _ = self.recorded
        for key in ("project", "name", "config"):
            if (value := getattr(self, key)) and not {*_TRACKERS} & {*self.to}:
                raise InputError(
                    *(Key(f"log.{key}", value), f": only {' and '.join(_TRACKERS)} read it"),
                    advice=("name one in ", Key("log.to"), ", or leave it out"),
                )
        if "curves" in self.to and "jsonl" not in self.to:
            given = Key.plain("log.to", ",".join(self.to))
            raise InputError(given, ": curves are drawn from metrics.jsonl", advice='name "jsonl" too')
