"""What a config or a recipe file is written with; its `get_config()` returns a `Config`.

A child config begins with another and says only what differs:

    def get_config():
        return load("imagenet_resnet50").replace(model={"name": "resnet34"})

The settings are the recipe, never the machine: batch sizes are global, and the number of devices changes nothing but,
where `model.batch_norm` is local, which slice of the batch is normalized together.
"""

from pathlib import Path

from jaxddp.recipe_file import read_recipe
from jaxddp.sections.config_tree import Config
from jaxddp.sections.data_section import AugmentConfig, DataConfig
from jaxddp.sections.eval_section import CheckpointConfig, EvalConfig, Views
from jaxddp.sections.log_section import LogConfig, ShownImages
from jaxddp.sections.loss_section import LossConfig
from jaxddp.sections.model_section import ModelConfig
from jaxddp.sections.objective_section import ObjectiveConfig
from jaxddp.sections.optimizer_section import OptimizerConfig
from jaxddp.sections.parallel_section import ParallelConfig
from jaxddp.sections.train_section import BatchSize, Precision, TrainConfig

__all__ = [
    "AugmentConfig",
    "BatchSize",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Precision",
    "ShownImages",
    "TrainConfig",
    "Views",
    "load",
]


def load(name_or_path: str | Path) -> Config:
    """The config of a recipe: its `get_config()`, or what a run wrote into its config.json.

    Args:
        name_or_path: a name in the project's configs/ (`"imagenet_resnet50"`), the path of a Python file, or that of a
            run's work directory or of the config.json in it. Within a recipe file a relative path begins beside that
            file, and the hooks of the recipe that is loaded are inherited.

    Raises:
        InputError: see `jaxddp.recipe_file.read_recipe`.
    """
    return read_recipe(name_or_path).config
