"""`--parallel.reproducible`: the same bits with any number of processes and threads."""

from pathlib import Path

import pytest
from support.data import random_table, write_arrays
from support.processes import BRIEF, STEPS, Launched, checkpoint_bytes, checkpoint_steps, lines

# tests/test_reproducible.py tests devices in one process.
pytestmark = pytest.mark.ci

# The images are large enough for XLA to split the sum of a kernel's gradient among threads.
RECIPE = """
import flax.linen as nn
from jaxddp.config import load


class Net(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, images, train):
        x = nn.Conv(8, (3, 3), strides=2, use_bias=False)(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
        return nn.Dense(self.classes)(x.mean((1, 2)))


def get_config():
    return load("digits").replace(data={"image_size": 32, "resize": 32}, log={"to": ("jsonl",)})


def get_model(config, num_classes):
    return Net(num_classes)
"""


@pytest.fixture(scope="module")
def train_words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("wide")
    recipe = folder / "wide.py"
    recipe.write_text(RECIPE)
    data = write_arrays(folder / "data.npz", random_table(96, image=32), random_table(16, image=32))
    train_words = ["train", str(recipe), "--data.path", str(data), *BRIEF, "--train.batch-size", "64"]
    return [*train_words, "--parallel.reproducible", "--log.every", "1 step"]


def train(train_words: list[str], workdir: Path, processes: int, devices: int) -> Path:
    train_words = [*train_words, "--workdir", str(workdir), "--parallel.cpu-devices", str(devices)]
    Launched(workdir, processes, train_words).ends_well()
    return workdir


@pytest.fixture(scope="module")
def alone(train_words, tmp_path_factory) -> Path:
    """A run of one process with four devices."""
    return train(train_words, tmp_path_factory.mktemp("alone"), 1, 4)


def test_a_reproducible_run_has_the_same_bits_over_any_processes(train_words, alone, tmp_path):
    """Two processes have a core each, one process has both; all have the same number of threads."""
    two = train(train_words, tmp_path, 2, 1)
    assert checkpoint_steps(alone)[-1] == STEPS
    assert checkpoint_bytes(two) == checkpoint_bytes(alone)
    assert [line["loss"] for line in lines(two)] == [line["loss"] for line in lines(alone)]


def test_a_reproducible_run_has_the_same_bits_with_any_number_of_threads(train_words, alone, tmp_path):
    """Four devices use 4 threads; one device uses as many as there are cores."""
    one = train(train_words, tmp_path, 1, 1)
    assert checkpoint_bytes(one) == checkpoint_bytes(alone)
