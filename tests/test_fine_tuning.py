"""Frozen layers, layers that train later, and learning rates by layer."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support.cases import rare_case
from support.data import CLASSES, random_table
from support.networks import largest_difference, randomized
from support.runs import copy_setup, setup_of, train
from support.shared import sgd

from jaxddp.api import prepare_training, softmax_cross_entropy
from jaxddp.api import train as fit
from jaxddp.config import AugmentConfig, Config, DataConfig, ModelConfig
from jaxddp.config.layers import Layers
from jaxddp.core.errors import InputError, Preempted
from jaxddp.engine.optimizer import thawing
from jaxddp.engine.parts.guard import GradientNorm
from jaxddp.models.adapt import adapt
from jaxddp.models.interface import by_path
from jaxddp.models.projection import Projection
from jaxddp.models.resnet import BASIC, Architecture, build
from jaxddp.objectives.simsiam import SimSiam
from jaxddp.training.checkpoints.manager import Checkpoints

ADAMW = optax.adamw(0.05)
QUIET = {"parallel": {"self_test": "never"}}
FOUR_STEPS = {"train": {"duration": "4 steps"}, "log": {"every": "4 steps"}}


def resnet(dtype="float32", blocks=2, **options):
    """Build a network with a stem, `blocks` layers of one block each, and a head."""
    network = build(ModelConfig("resnet10", width=2, stem="small", **options), CLASSES, dtype, dtype)
    return network.clone(architecture=Architecture(blocks * (1,), BASIC))


def make_setup(config=None, *, model=None, optimizer=None, devices=1, **more):
    config = Config().replace(**(QUIET | (config or {})))
    optimizer = optimizer or ADAMW
    setup = setup_of(model or resnet(), optimizer, devices=devices, config=config, batch_size=12, **more)
    # Scales of zero would hide a missing gradient.
    state = setup.state.replace(params=randomized(setup.state.params))
    return dataclasses.replace(setup, state=setup.topology.replicate(state))


def arrays(state):
    variables = jax.device_get((state.params, state.model_state))
    return {path: np.asarray(leaf) for path, leaf in by_path(*variables).items()}


def changed_between(before, after):
    return {path for path in before if before[path].tobytes() != after[path].tobytes()}


# The frozen layers, and the modules that are trained.
HEAD = ("all but layer2,fc", {"layer2_0", "fc"})
STEM = ("conv1,layer1.0", {"bn1", "layer2_0", "fc"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freeze", "trained", "devices", "accumulate"),
    [(*HEAD, 1, 1), (*STEM, 3, 2), rare_case(*HEAD, 3, 2), rare_case(*STEM, 1, 1)],
)
def test_frozen_layers_keep_every_bit(freeze, trained, devices, accumulate):
    setup = make_setup({"model": {"freeze": freeze}, "train": {"accumulate": accumulate}}, devices=devices)
    before = arrays(setup.state)
    after = arrays(train(setup, FOUR_STEPS))
    assert changed_between(before, after) == {path for path in before if path.split("/")[1] in trained}


@pytest.mark.slow
def test_frozen_parameters_have_no_optimizer_state_and_no_gradient():
    setup = make_setup({"model": {"freeze": "all but layer2,fc"}})
    trained = [path for path in arrays(setup.state) if path.startswith(("params/layer2", "params/fc"))]
    assert len([leaf for leaf in jax.tree.leaves(setup.state.opt_state) if leaf.ndim]) == 2 * len(trained)
    plain = make_setup()
    steps = [each.compiled_steps(resident=False).function for each in (setup, plain)]
    batch, states = next(setup.batches(0, 1)), (setup.state, plain.state)
    programs = [step.lower(state, batch) for step, state in zip(steps, states, strict=True)]
    less, flops = (program.cost_analysis()["flops"] for program in programs)
    assert less < 0.6 * flops


@pytest.mark.slow
def test_a_linear_probe_equals_the_regression_on_features():
    """A step follows the gradient of the head, for the features of the frozen network in evaluation mode."""
    data = DataConfig(augment=AugmentConfig(flip=False))
    setup = make_setup({"model": {"freeze": "all but fc"}}, optimizer=sgd(0.5), data=data)
    params, state, batch = setup.state.params, setup.state.model_state, next(setup.batches(0, 1))

    def loss(head):
        sums, _ = setup.supervised({**params, "fc": head}, state, batch, train=False)
        return sums.values[0, 0] / sums.values[0, 1]

    grads = jax.jit(jax.grad(loss))(params["fc"])
    expected = jax.tree.map(lambda p, g: np.asarray(p - 0.5 * g), params["fc"], grads)
    after, _ = setup.step()(setup.state, batch)
    assert largest_difference(after.params["fc"], expected) < 1e-6
    assert np.abs(grads["kernel"]).max() > 1e-3


class NNXNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv, self.norm = nnx.Conv(3, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.fc = nnx.Linear(4, CLASSES, rngs=rngs)

    def __call__(self, images):
        return self.fc(jax.nn.relu(self.norm(self.conv(images))).mean((1, 2)))


class LinenNet(nn.Module):
    """A network that passes the mode to batch norm in the call. `resnet` sets an attribute."""

    by_position: bool = False

    @nn.compact
    def __call__(self, images, train: bool):
        x, norm = nn.Conv(4, (3, 3), name="conv")(images), nn.BatchNorm(name="norm")
        x = norm(x, not train) if self.by_position else norm(x, use_running_average=not train)
        return nn.Dense(CLASSES, name="fc")(nn.relu(x).mean((1, 2)))


@pytest.mark.slow
@pytest.mark.parametrize("network", [NNXNet, LinenNet, lambda: LinenNet(by_position=True)])
def test_a_frozen_batch_norm_of_any_module_uses_its_running_statistics(network):
    setup = make_setup({"model": {"freeze": "conv,norm"}}, model=network(), optimizer=sgd(0.1))
    before = arrays(setup.state)
    params, state = setup.state.params, setup.state.model_state
    images = jax.random.normal(jax.random.key(1), (4, 6, 6, 3))
    frozen, plain = setup.network, adapt(network())
    logits = [model.apply(params, state, images, train=True, key=None)[0] for model in (frozen, plain)]
    expected = plain.apply(params, state, images, train=False, key=None)[0]
    assert largest_difference(logits[0], expected) == 0 and largest_difference(logits[1], expected) > 1e-2
    assert {path.split("/")[-2] for path in changed_between(before, arrays(train(setup, FOUR_STEPS)))} == {"fc"}


@pytest.mark.slow
def test_with_layer_decay_earlier_layers_have_lower_rates():
    simsiam = SimSiam(Projection(2, 6, 4))
    setup = make_setup({"optimizer": {"layer_decay": 0.5}}, optimizer=sgd(1.0), objective=simsiam)
    ones = jax.tree.map(jnp.ones_like, setup.state.params)
    updates, _ = setup.optimizer.update(ones, setup.state.opt_state, setup.state.params)
    rates = {"conv1": 1 / 8, "bn1": 1 / 8, "layer1_0": 1 / 4, "layer2_0": 1 / 2, "fc": 1, "simsiam": 1}
    for name, rate in rates.items():
        assert all(np.all(leaf == -rate) for leaf in jax.tree.leaves(updates[name]))


@pytest.mark.slow
def test_layers_are_trained_from_their_unfreezing_step_on(tmp_path):
    model = {"unfreeze": ("layer3=2 steps", "conv1=50%"), "freeze": "layer2"}
    six_steps = {"train": {"duration": "6 steps"}, "log": {"every": "6 steps"}}
    setup = make_setup({"model": model, "train": {"duration": "6 steps"}}, model=resnet(blocks=3))
    initial = arrays(setup.state)
    trained_layers, before = [], initial
    for steps in range(1, 5):
        after = arrays(train(copy_setup(setup), {"train": {"duration": f"{steps} steps"}}))
        params = {path for path in changed_between(before, after) if path.startswith("params")}
        trained_layers.append({path.split("/")[1] for path in params})
        before = after
    always = {"bn1", "layer1_0", "fc"}
    assert trained_layers == [always, always, always | {"layer3_0"}, always | {"layer3_0", "conv1"}]
    with Checkpoints(tmp_path / "c") as checkpoints:
        uninterrupted = train(copy_setup(setup), six_steps)
        with pytest.raises(Preempted):
            train(copy_setup(setup), six_steps, checkpoints=checkpoints, should_stop=lambda step: step >= 1)
        resumed = train(copy_setup(setup), six_steps, checkpoints=checkpoints, resume_step=checkpoints.latest())
    assert not changed_between(arrays(uninterrupted), arrays(resumed))
    # Layers that train later keep their running statistics, because their scales fit these statistics.
    statistics = {path for path in changed_between(initial, arrays(uninterrupted)) if path.startswith("batch_stats")}
    assert {path.split("/")[1] for path in statistics} == {"bn1", "layer1_0"}


@pytest.mark.slow
def test_clipping_counts_only_layers_that_a_step_trains():
    """The first step that trains the convolution is step 2, and no step trains the norm."""
    config = {"model": {"unfreeze": ["conv=2 steps"]}, "optimizer": {"rate_factors": ["norm=0"]}}
    (norm,) = make_setup(config, model=LinenNet(), parts=(GradientNorm(1.0),)).parts
    values = {"conv": ("kernel", 100.0), "norm": ("scale", 50.0), "fc": ("bias", 2.0)}
    grads = {layer: {name: jnp.full(4, value)} for layer, (name, value) in values.items()}
    own = norm.init(grads, {})
    for expected in (4, 4, 4 * 2501**0.5):
        clipped = norm.gradients(own, grads)
        own, _ = norm.update(own, None, None, clipped)
        assert norm.report(own, grads)["gradient_norm"] == pytest.approx(expected)
        assert largest_difference(clipped, jax.tree.map(lambda grad, n=expected: grad / n, grads)) < 1e-5


@pytest.mark.parametrize("key", [{"freeze": "norm"}, pytest.param({"unfreeze": ["norm=1 step"]}, marks=pytest.mark.ci)])
def test_a_frozen_norm_of_two_functions_must_keep_its_statistics(key):
    def init(key, example):
        return {"norm": {"scale": jnp.ones(3)}, "mean": {"w": jnp.ones((3, CLASSES))}}, {"norm": {"mean": jnp.zeros(3)}}

    def apply(params, state, images, train, frozen=False):
        x = images.mean((1, 2))
        mean = x.mean(0) if train and not frozen else state["norm"]["mean"]
        logits = (x - mean) * params["norm"]["scale"] @ params["mean"]["w"]
        return logits, state if frozen else {"norm": {"mean": mean}}

    def frozen(params, state, images, train):
        return apply(params, state, images, train, frozen=True)

    with pytest.raises(InputError, match="^model: the network changes the state norm/mean of a layer that is frozen"):
        make_setup({"model": key}, model=(init, apply))
    make_setup({"model": key}, model=(init, frozen))
    make_setup({"model": key}, model=(init, jax.jit(frozen, static_argnames="train")))
    make_setup({"model": {"freeze": "mean"}}, model=(init, apply))


@pytest.mark.slow
def test_parameter_groups_equal_freezing_and_rate_factors():
    """Frozen parameters and statistics keep their bits, and have no optimizer state."""
    keys = {"model": {"freeze": "norm"}, "optimizer": {"rate_factors": ["fc=10", "conv=0.5"]}}
    groups = ["norm:frozen=true", "fc:rate=10", "conv:rate=0.5"]
    by_keys, by_groups = (make_setup(config, model=LinenNet()) for config in (keys, {"optimizer": {"groups": groups}}))
    assert jax.tree.structure(by_keys.state.opt_state) == jax.tree.structure(by_groups.state.opt_state)
    initial = arrays(by_keys.state)
    first, second = (arrays(train(setup, FOUR_STEPS)) for setup in (by_keys, by_groups))
    assert not changed_between(first, second)
    changed = changed_between(initial, first)
    assert {path.split("/")[1] for path in initial} - {path.split("/")[1] for path in changed} == {"norm"}
    message = "^optimizer.groups: norm:decay=0.1: batch norm and biases are never decayed; leave it out"
    with pytest.raises(InputError, match=message):
        make_setup({"optimizer": {"groups": ["norm:decay=0.1"]}}, model=LinenNet())


def test_the_first_updates_of_an_unfrozen_layer_have_its_learning_rate():
    optimizer = thawing(optax.adam(1.0), {"x": 50})
    params = {"x": jnp.zeros(2)}
    state, grads = optimizer.init(params), {"x": jnp.full(2, 0.3)}
    for _ in range(52):
        updates, state = optimizer.update(grads, state, params)
    assert np.allclose(updates["x"], -1, atol=1e-3)
    # A negative zero keeps its sign until it is trained.
    optimizer = thawing(sgd(1.0), {"x": 1})
    params = {"x": jnp.array([-0.0, 0.0, 1.0])}
    updates, _ = optimizer.update({"x": jnp.ones(3)}, optimizer.init(params), params)
    assert np.signbit(optax.apply_updates(params, updates)["x"]).tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("layer1", ["layer1_0/conv1/kernel", "layer1"], ["layer10/kernel", "fc/layer1", "layer"]),
        ("layer1.0,fc/bias", ["layer1_0/bn1", "fc/bias"], ["layer1_1/bn1", "fc/kernel"]),
        ("all but fc, layer4", ["layer3_0/bn1", "lora_a"], ["fc/kernel", "layer4_0/bn1", "lora/x", "simsiam/x"]),
        ("all but the head", ["layer1_0/fc/kernel", "headless"], ["fc/kernel", "head/bias"]),
        ("", [], ["fc", ""]),
    ],
)
def test_layers_are_selected_by_the_beginning_of_their_names(text, inside, outside):
    layers = Layers.parse(text, "model.freeze")
    assert all(name in layers for name in inside) and not any(name in layers for name in outside)
    with pytest.raises(InputError, match="k: the head may be either of head and fc; name one"):
        Layers.parse("the head", "k").check(["fc/bias", "head/bias"], "k")


WITHOUT_PARAMETERS = lambda key, example: {}, lambda params, images: images.sum((1, 2))[:, :1] * jnp.ones(CLASSES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"freeze": "conv1,,fc"}, "freeze='conv1,,fc': expected prefixes of layer names"),
        ({"freeze": "conv1,bn1,layer1,layer2,fc"}, "freeze=.*: no layer is left to train"),
        ({"unfreeze": ["layer2"]}, "unfreeze: 'layer2': expected LAYER=VALUE"),
        ({"unfreeze": ["layer5=1 step"]}, "unfreeze: no layer's name begins with 'layer5'"),
        ({"unfreeze": ["fc=1 step"], "freeze": "fc"}, "unfreeze: 'fc' is frozen by freeze=fc"),
        ({"rate_factors": ["fc=1", "fc=2"]}, "rate_factors: 'fc' has two values, 1 and 2; give only one"),
        ({"rate_factors": "head=2"}, "rate_factors: no layer's name begins with 'head'; did you mean 'fc'[?]"),
        ({"rate_factors": "fc=2", "freeze": "fc"}, "rate_factors: 'fc' is frozen by"),
        ({"groups": "fc"}, "groups: 'fc': expected LAYER:rate=X, LAYER:decay=X or LAYER:frozen=true"),
        ({"groups": ["fc:rate=-1"]}, "groups: fc:rate=-1.0: expected 0 to 1,000,000"),
        ({"groups": ["fc:frozen=yes"]}, "groups: fc:frozen='yes': expected 'true'"),
        ({"groups": "fc:rate=2,fc:rate=3"}, "groups: 'fc:rate' has two values, 2 and 3; give only one"),
        ({"groups": "fc:decay=0"}, "groups: fc:decay=0: optimizer gives an object, which has its own decay; leave it"),
        ({"groups": "fc:rate=2", "freeze": "fc"}, "groups: 'fc' is frozen by freeze=fc"),
        ({"model": LinenNet(), "layer_decay": 0.5}, "layer_decay=0.5: LinenNet does not define the depth of its layer"),
        ({"model": WITHOUT_PARAMETERS}, "model: the network has no parameters, so nothing can be trained; give it"),
    ],
)
def test_a_wrong_layer_setting_raises_a_one_line_error(changes, message):
    arguments = {"model": resnet(), "table": random_table(20), "devices": 1, "optimizer": sgd(0.1)} | changes
    with pytest.raises(InputError, match=f"^{message}"):
        prepare_training(**arguments, batch_size_per_device=4)


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ({"unfreeze": "conv=50%"}, "unfreeze: 50% is a fraction"),
        ({"swa": "1 epoch"}, "swa: it depends on the last step"),
        ({"lookahead": 2}, "lookahead: it depends on the last step"),
    ],
)
def test_a_setting_that_depends_on_the_length_raises_an_error_if_the_run_has_another(option, problem):
    setup = prepare_training(LinenNet(), random_table(20), 1, sgd(0.1), 4, **option)
    with pytest.raises(InputError, match=f"^{problem} of a run of 1 epoch, but the length is now 3 epochs; give the "):
        fit(softmax_cross_entropy, setup, epochs=3, listeners=())
