"""The `log` section of a config: the loggers of a run, and the values that they log."""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import Range
from jaxddp.overrides import names_of
from jaxddp.registry import Requires
from jaxddp.sections.layers import assignments

ShownImages = Annotated[int, Range(0, 256)]
"""The number of images in a picture."""
_TRACKERS = ("wandb", "mlflow")


@dataclass(frozen=True)
class LogConfig:
    """The loggers of the run, and the values that they log."""

    every: Duration = Duration.parse("50 steps")
    """How often to log the metrics of training."""
    to: tuple[str, ...] = ("jsonl", "curves", "parameters", "tensorboard")
    """Loggers by name. "jsonl" writes metrics.jsonl and result.json, "curves" draws curves.png from metrics.jsonl,
    "parameters" lists the network's parameters in parameters.txt, "tensorboard" writes event files, "confusion" writes
    the last validation's confusion matrix to confusion.csv, and "wandb" and "mlflow" log to Weights & Biases and
    MLflow, which need the extra of the same name. If a logger other than "jsonl" fails, the run logs this and
    continues."""
    project: str | None = None
    """Project for "wandb", experiment for "mlflow". If None, the tracker's environment variable, else "jaxddp"."""
    name: str | None = None
    """Name of the run for "wandb" and "mlflow". If None, WANDB_NAME, else the name of the work directory."""
    config: tuple[str, ...] = ()
    """Further values that "wandb" and "mlflow" record with the config: "note=baseline,fold=3"."""
    images: Annotated[ShownImages, Requires("log.to", ("tensorboard", "wandb", "mlflow"))] | None = None
    """Number of validation images whose predictions "wandb", "mlflow" and "tensorboard" show. If None, 16 with "wandb"
    or "mlflow", otherwise none."""
    guard_formulas: Annotated[bool, Requires("log.to", ("confusion",))] = False
    """In confusion.csv, put an apostrophe before class names that a spreadsheet would read as a formula, because
    they begin with =, +, -, @, a tab or a line break."""
    gradient_norm: bool = False
    """Log the norm of the averaged gradient. With `optimizer.clip_norm` it is always logged."""
    profile: Duration | None = None
    """Length of a trace for TensorBoard's profiler, such as "10 steps". The trace starts a few steps after the first
    step and is written to profile/ in the work directory. If None, no trace."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", names_of(self.to))
        object.__setattr__(self, "config", names_of(self.config))

    @cached_property
    def recorded(self) -> dict[str, str]:
        """The parsed `config`, by name. Raises: InputError if the text is invalid."""
        return assignments(self.config, "log.config", "NAME")

    def check(self) -> None:
        """Check that each key that is set is read by a logger in `to`.

        Raises:
            InputError: no logger reads a key, `config` is invalid, or "curves" is set without "jsonl".
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
