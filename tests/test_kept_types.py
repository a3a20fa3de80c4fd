"""The types of a training state do not change. An object that changes them is an error before the first step."""

import jax
import jax.numpy as jnp
import optax
import pytest
from support.data import CLASSES, random_table
from support.networks import linear_model

import jaxddp
from jaxddp.core.errors import InputError
from jaxddp.engine.parts.part import Part
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import Topology
from jaxddp.models.interface import cast_like

TABLE = random_table(24, image=6)


def optimizer(initial, later, updates=lambda updates: updates) -> optax.GradientTransformation:
    """Return an optimizer whose state is `initial` at first and `later` after each step."""
    return optax.GradientTransformation(
        lambda params: initial, lambda grads, state, params=None: (updates(jax.tree.map(lambda g: -g, grads)), later)
    )


def network(initial, later):
    """Return a network whose model state is `initial` at first and `later` after each step."""

    def init(key, example):
        params, state = linear_model()[0](key, example), {"seen": initial}
        return params, state

    def apply(params, model_state, images, *, train):
        return linear_model()[1](params, images), {"seen": later} if train else model_state

    return init, apply


class Growing(Part):
    name = "grown"

    def init(self, params, model_state):
        return {"count": jnp.zeros((), jnp.int32)}

    def update(self, own, before, after, grads):
        return {"count": own["count"] + jnp.float32(1)}, after


class Summing(Part):
    name = "summing"

    def gradients(self, own, grads):
        return jax.tree.map(jnp.sum, grads)


SCALAR = jnp.zeros(())
CASES = {
    "a shape": ({"optimizer": optimizer(SCALAR, jnp.zeros(2))}, "optimizer: opt_state is float32[] before a step and"),
    "a dtype": (
        {"optimizer": optimizer({"m": SCALAR}, {"m": jnp.zeros((), jnp.bfloat16)})},
        "optimizer: opt_state/m is float32[] before a step and bfloat16[] after it; keep names, shapes and dtypes",
    ),
    "another array": ({"optimizer": optimizer({}, {"late": SCALAR})}, "optimizer: opt_state/late is absent before a"),
    "a structure": ({"optimizer": optimizer((SCALAR,), [SCALAR])}, "optimizer: opt_state is PyTreeDef"),
    "updates that are broadcast": (
        {"optimizer": optimizer((), (), lambda updates: jax.tree.map(lambda u: jnp.stack([u, u]), updates))},
        "optimizer: params/weight is float32[108, 5] before a step and float32[2, 108, 5] after it",
    ),
    "a network": (
        {"model": network(jnp.zeros((), jnp.int32), SCALAR)},
        "model: model_state/seen is int32[] before a step and float32[] after it",
    ),
    "no elements": ({"optimizer": optimizer(*[{"m": jnp.zeros(0)}] * 2)}, "opt_state/m: cannot be saved without"),
    "a part": ({"parts": [Growing()]}, "the part 'grown': parts/grown/count is int32[] before a step and float32[]"),
    "gradients": ({"parts": [Summing()]}, "the part 'summing': gradients/weight is float32[108, 5] before a step and"),
}


# With images in device memory, several steps form a loop, in which JAX itself would raise an error.
@pytest.mark.parametrize(("case", "cache"), [*((case, "none") for case in CASES), ("a shape", "device")])
def test_a_step_that_changes_a_state_type_raises_a_one_line_error_before_training(case, cache, tmp_path):
    changes, expected = CASES[case]
    arguments = {"model": linear_model(), "optimizer": optax.sgd(0.1), "parts": []} | changes
    words = {"parts": arguments["parts"], "data": jaxddp.DataConfig(cache=cache)}
    setup = jaxddp.prepare_training(arguments["model"], TABLE, 2, arguments["optimizer"], 4, **words)
    records = []

    class Listener:
        def step(self, record):
            records.append(record)

    with pytest.raises(InputError) as raised:
        jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=[Listener()], workdir=tmp_path / "run")
    assert str(raised.value).startswith(expected)
    # The run has not started.
    assert records == [] and not (tmp_path / "run").exists()


def test_a_part_whose_type_a_validation_changes_raises_a_one_line_error():
    class Following(Growing):
        follows = True

        def validated(self, own, metrics):
            return {"count": metrics["val loss"]}

    topology = Topology.create(1)
    setup = jaxddp.prepare_training(linear_model(CLASSES), TABLE, 1, optax.sgd(0.1), 8, parts=[part := Following()])
    with pytest.raises(InputError, match=r"follow a validation: parts/grown/count is int32\[\] before .* float32\[\]"):
        Way(topology).follow([part])(setup.state, {"loss": 1.0})


def test_floats_of_the_model_state_keep_their_initial_dtype():
    """The statistics change dtype like those of Flax's batch norm under x64."""
    with jax.enable_x64(True):
        before = {"mean": jnp.zeros(3, jnp.float32), "count": jnp.zeros((), jnp.int32)}
        after = cast_like(before, {"mean": jnp.full(3, 0.5, jnp.float64), "count": jnp.ones((), jnp.int32)})
        assert {name: leaf.dtype.name for name, leaf in after.items()} == {"mean": "float32", "count": "int32"}
        assert cast_like(before, {}) == {} and after["mean"].tolist() == [0.5] * 3
