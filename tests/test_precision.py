"""`train.precision` applies to convolutions and not to parameters or the loss. Its default depends on the devices."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs
from support.data import CLASSES, NO_AUGMENTATION, random_table
from support.runs import experiment_of, train_config
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.mesh import Topology
from jaxddp.models.ops.stems import small_stem
from jaxddp.models.resnet import BASIC, Architecture, ResNet
from jaxddp.setup.prepare import initialize
from jaxddp.setup.run_setup import RunSetup

SIZE, BATCH = 8, 8
TABLE = random_table(4 * BATCH, image=SIZE)


def setup_of(precision: str) -> RunSetup:
    network = ResNet(Architecture((1, 1), BASIC), CLASSES, width=4, stem=small_stem, dtype=precision)
    config = Config().replace(train={"precision": precision})
    return runs.setup_of(
        network, sgd(0.05, 0.9), TABLE, devices=2, config=config, batch_size=BATCH, data=NO_AUGMENTATION
    )


@pytest.mark.slow
def test_parameters_statistics_and_loss_are_float32_and_convolutions_are_not():
    setup = setup_of("bfloat16")
    step = setup.step()
    batch = next(setup.batches(0, 1))
    program = str(jax.make_jaxpr(step)(setup.state, batch))
    outputs = re.findall(r":(\w+)\[[\d,]*\](?:\{[^}]*\})? = conv_general_dilated", program)
    assert outputs and set(outputs) == {"bf16"}
    state, sums = jax.eval_shape(step, setup.state, batch)
    leaves = jax.tree.leaves((state.params, state.model_state, state.opt_state, sums.values))
    assert {leaf.dtype for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)} == {jnp.dtype("float32")}


@pytest.mark.slow
def test_losses_in_bfloat16_are_close_to_losses_in_float32():
    losses = {}
    for precision in ("float32", "bfloat16"):
        setup = setup_of(precision)
        step = setup.step()
        state, step_losses = setup.state, []
        for batch in setup.batches(0, 4):
            state, sums = step(state, batch)
            step_losses.append(sums.means()["loss"])
        losses[precision] = step_losses
    # bfloat16 has eight bits of mantissa, so the losses are close and not equal.
    assert losses["bfloat16"] != losses["float32"]
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.05)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    arrays = {f"{split}_{name}": getattr(TABLE, name) for split in ("train", "val") for name in ("images", "labels")}
    np.savez(tmp_path / "arrays.npz", **arrays)
    return Config().replace(
        data={"path": str(tmp_path / "arrays.npz"), "image_size": SIZE, "crop": "whole"},
        model={"name": "resnet10", "width": 2, "stem": "small"},
        train={"batch_size": BATCH, "duration": "1 step"},
        eval={"batch_size": BATCH, "every": "0 steps"},
        log={"to": ("jsonl", "curves")},
        parallel={"devices": 1},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "configured", "expected"),
    [
        ("cpu", None, "float32"),
        ("gpu", None, "bfloat16"),
        ("gpu", "float32", "float32"),
        ("cpu", "bfloat16", "bfloat16"),
    ],
)
def test_the_precision_is_that_of_the_config_or_the_default_of_the_devices(
    platform, configured, expected, config, monkeypatch
):
    monkeypatch.setattr(Topology, "platform", platform)
    experiment = experiment_of(config.replace(train={"precision": configured}))
    assert experiment.config.train.precision == expected
    assert experiment.recipe.model.module.dtype == initialize(experiment).preprocess.dtype == expected


@pytest.mark.slow
def test_the_precision_is_saved_and_a_run_with_another_precision_is_rejected(config, tmp_path, monkeypatch):
    train_config(config, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["precision"] == "float32"
    monkeypatch.setattr(Topology, "platform", "gpu")
    with pytest.raises(InputError, match="train.precision was 'float32' and is now 'bfloat16'"):
        train_config(config, tmp_path / "run")
