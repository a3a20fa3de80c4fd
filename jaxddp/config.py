"""The classes of a config. The `get_config()` of a recipe file returns a `Config`.

A recipe can load another one and change only some keys:

    def get_config():
        return load("imagenet_resnet50").replace(model={"name": "resnet34"})

A config describes the recipe and not the machine. Batch sizes are global, and the result does not depend on the number
of devices, except with local batch norm (`model.batch_norm`), which normalizes each device's part of a batch by itself.
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
    """Load the config of a recipe or of a run.

    Args:
        name_or_path: the name of a built-in config (`"imagenet_resnet50"`), the path of a recipe file, or the work
            directory of a run or its config.json. In a recipe file, a relative path starts in the folder of that file,
            and the hooks of the loaded recipe are inherited.

    Returns:
        The result of the recipe's `get_config()`, or the config that the run stored.

    Raises:
        InputError: see `jaxddp.recipe_file.read_recipe`.
    """
    return read_recipe(name_or_path).config
