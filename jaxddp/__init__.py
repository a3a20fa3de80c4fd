"""Data-parallel training of image classifiers in JAX. The names here are for notebooks and launch scripts."""

from jaxddp.api import (
    evaluate,
    prepare_training,
    show_predictions,
    softmax_cross_entropy,
    topk_accuracy,
    train,
)
from jaxddp.config import Config, DataConfig
from jaxddp.data.arrays import ArrayTable
from jaxddp.data.table import ExampleTable, test_listing, train_solutions, val_solutions
from jaxddp.errors import InputError
from jaxddp.models.adapt import adapt
from jaxddp.models.resnet import resnet
from jaxddp.run.setup import RunSetup
from jaxddp.runtime.listeners.history import History

__all__ = [
    "ArrayTable",
    "Config",
    "DataConfig",
    "ExampleTable",
    "History",
    "InputError",
    "RunSetup",
    "adapt",
    "evaluate",
    "prepare_training",
    "resnet",
    "show_predictions",
    "softmax_cross_entropy",
    "test_listing",
    "topk_accuracy",
    "train",
    "train_solutions",
    "val_solutions",
]
