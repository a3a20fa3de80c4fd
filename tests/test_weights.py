"""Weights of torchvision's and timm's networks are read and written; `torch_logits.py` compares PyTorch's logits."""

import functools

import flax.linen as nn
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from support.data import random_table
from support.networks import SmallNet, largest_difference, state_dict_of
from support.published import CLASSES
from support.runs import setup_of
from support.shared import adapted, sgd

from jaxddp.api import export_weights, prepare_training, train
from jaxddp.config import ModelConfig
from jaxddp.config.layers import Layers
from jaxddp.core.errors import InputError
from jaxddp.losses import softmax_cross_entropy
from jaxddp.mesh import Topology
from jaxddp.models.interface import by_path, shapes_of
from jaxddp.models.resnet import BASIC, Architecture, build
from jaxddp.setup.initial_weights import WeightsTarget, initial_weights
from jaxddp.weights.match import dotted_path, match, namings_of
from jaxddp.weights.state_dict import read, write

SHAPE = (6, 6, 3)


def small_resnet(classes=CLASSES):
    """Build a ResNet of two blocks, with 32 arrays."""
    network = build(ModelConfig("resnet10", width=4, stem="small"), classes)
    return adapted(network.clone(architecture=Architecture((1, 1), BASIC)))


class Odd(nn.Module):
    """A network with a scalar, and a count in its state."""

    @nn.compact
    def __call__(self, images, train: bool):
        self.variable("counters", "steps", lambda: jnp.full((), 3, jnp.int32))
        return nn.Dense(5)(images.mean((1, 2))) * self.param("temperature", nn.initializers.constant(2.0), ())


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: small_resnet(5), SmallNet, Odd], ids=["published", "own names", "scalars"])
def test_exported_weights_are_read_back_bit_for_bit(tmp_path, make):
    setup = setup_of(make(), optax.adamw(0.01), random_table(20), devices=2)
    export_weights(setup.state, setup, tmp_path / "w.safetensors")
    names = safetensors.numpy.load_file(tmp_path / "w.safetensors")
    assert ("layer1.0.conv1.weight" in names) == hasattr(setup.network.module, "published_names")
    start = functools.partial(prepare_training, make(), random_table(20), 1, optax.adamw(0.01), 8, seed=1)
    again = start(weights=tmp_path / "w.safetensors")
    assert largest_difference(again.state.params, setup.state.params) == 0
    assert largest_difference(again.state.model_state, setup.state.model_state) == 0
    assert largest_difference(start().state.params, setup.state.params) > 0


def test_a_new_head_starts_at_zero(tmp_path, caplog):
    """It is a head for other classes, or one that the config names. That of a user's network keeps its own values."""
    named = small_resnet(5)
    write(tmp_path / "w.safetensors", {**state_dict_of(small_resnet(), SHAPE), "extra.weight": np.zeros(3)})
    write(tmp_path / "same.safetensors", state_dict_of(named, SHAPE))
    for file, layers, told in (("w", "", "; not used: extra.weight"), ("same", "fc", "")):
        target = WeightsTarget(named, SHAPE, 5, new_layers=Layers.parse(layers, "model.new_layers"))
        arrays = initial_weights(tmp_path / f"{file}.safetensors", target, Topology.create(1))
        zeros = {path: array.shape for path, array in arrays.items() if not array.any()}
        assert zeros == {"params/fc/kernel": (8, 5), "params/fc/bias": (5,)} and set(arrays) == set(target.shapes)
        heads = "30 of the network's 32 arrays; a new head for 5 classes: params/fc/bias, params/fc/kernel"
        assert caplog.messages.pop() == f"{tmp_path / file}.safetensors: {heads}{told}"
    target = WeightsTarget(adapted(SmallNet(5)), SHAPE, 5, new_layers=Layers.parse("Dense_0", "model.new_layers"))
    write(tmp_path / "own.safetensors", {dotted_path(path): np.ones(shape) for path, shape in target.shapes.items()})
    arrays = initial_weights(tmp_path / "own.safetensors", target, Topology.create(1))
    assert set(target.shapes) - set(arrays) == {"params/Dense_0/kernel", "params/Dense_0/bias"}
    infinite = {dotted_path(path): np.full(shape, np.inf) for path, shape in target.shapes.items()}
    with pytest.raises(InputError, match="w.pth: [a-z]+_.* is not finite, as after an overflow in float16; give other"):
        initial_weights(tmp_path / "w.pth", target, Topology.create(1), infinite)
    shapes = {"params/head/kernel": (4, 4), "params/mlp/kernel": (4, 4)}
    stored = {dotted_path(path): np.ones(shape) for path, shape in shapes.items()}
    assert match(shapes, stored, (dotted_path,), 4, new_head=True).head == ("params/head/kernel",)
    with pytest.raises(InputError, match="^the head for other classes is not known; name it in model.new_layers$"):
        match(shapes, stored, (dotted_path,), 3, new_head=True)
    assert match(shapes, stored, (dotted_path,), 3, Layers.parse("mlp", ""), new_head=True).new


@pytest.mark.slow
def test_new_layers_take_no_weights_from_the_file(tmp_path, caplog):
    write(file := tmp_path / "w.safetensors", state_dict_of(small_resnet(5), SHAPE))
    start = functools.partial(prepare_training, small_resnet(5), random_table(20), 1, sgd(0.1), 4, weights=file, seed=1)
    setup, whole = start(new_layers="fc,layer1.0.bn1"), start()
    first, second = (by_path(made.state.params, made.state.model_state) for made in (setup, whole))
    differing = {path.rpartition("/")[0] for path in first if not np.array_equal(first[path], second[path])}
    assert differing == {"params/fc", "params/layer1_0/bn1", "batch_stats/layer1_0/bn1"}
    assert len(caplog.messages) == 1 and "26 of the network's 32 arrays; new: params/layer1_0/bn1" in caplog.messages[0]


def test_weights_that_do_not_fit_are_listed():
    model = small_resnet()
    arrays = state_dict_of(model, SHAPE)
    arrays["layer1.0.conv1.weights"] = arrays.pop("layer1.0.conv1.weight")
    arrays["conv1.weight"] = np.zeros((4, 3, 7, 7))
    with pytest.raises(InputError) as error:
        match(shapes_of(model, SHAPE), arrays, namings_of(model), CLASSES)
    assert str(error.value) == (
        "1 of the network's 32 arrays missing: layer1.0.conv1.weight, did you mean 'layer1.0.conv1.weights'?; 1 with "
        "another shape: conv1.weight is [4, 3, 7, 7] in the file and [4, 3, 3, 3] in the network; give weights of this "
        "network for such images, choose the network of these weights (model.name, width and stem), or initialize "
        "these layers anew (model.new_layers)"
    )
    # The message stays short, however much differs.
    wide = adapted(build(ModelConfig("resnet10", width=8, stem="imagenet"), CLASSES))
    with pytest.raises(InputError, match="30 with another shape: .* in the network and 28 more; give weights") as error:
        match(shapes_of(wide, (64, 64, 3)), state_dict_of(model, SHAPE), namings_of(wide), CLASSES)
    assert len(str(error.value)) < 450
    # A single layer is reported too: it is not the head.
    arrays = state_dict_of(model, SHAPE) | {"conv1.weight": np.zeros((4, 3, 7, 7))}
    with pytest.raises(InputError, match="^1 with another shape: conv1.weight is"):
        match(shapes_of(model, SHAPE), arrays, namings_of(model), CLASSES)


FLOAT8 = [pytest.param(kind, marks=pytest.mark.ci) for kind in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)]


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, *FLOAT8])
def test_arrays_of_any_precision_and_of_a_wrapped_module_are_read_and_converted(tmp_path, dtype):
    model, file = small_resnet(5), tmp_path / "w.safetensors"
    arrays = {name: array.astype(dtype) for name, array in state_dict_of(model, SHAPE).items()}
    held = {"loss.weight": np.ones(5)} | {f"model.{name}": array for name, array in arrays.items()}
    write(file, {f"module._orig_mod.module.{name}": array for name, array in held.items()})
    assert read(file)["model.conv1.weight"].dtype == dtype
    setup = prepare_training(model, random_table(20), 1, sgd(0.1), 4, weights=file)
    bias = setup.state.params["bn1"]["bias"]
    assert bias.dtype == jnp.float32 and np.array_equal(bias, arrays["bn1.bias"].astype(np.float32))


@pytest.mark.slow
def test_weights_are_read_from_the_checkpoint_of_a_work_directory(tmp_path, caplog):
    table = random_table(24)
    setup = prepare_training(SmallNet(), table, 2, optax.adamw(0.1), 4, epochs=3)
    state, _ = train(softmax_cross_entropy, setup, workdir=tmp_path / "w", listeners=(), save_every="3 epochs")
    again = prepare_training(SmallNet(), table, 1, sgd(0.1), 8, seed=5, weights=tmp_path / "w")
    assert largest_difference(again.state.params, state.params) == 0 and int(again.state.step) == 0
    assert not caplog.messages


def header(text: str) -> bytes:
    """Return the beginning of a .safetensors file."""
    return len(text).to_bytes(8, "little") + text.encode()


OF_FLOAT4 = header('{"conv": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}') + b"12"
EMPTY_OF_HUGE_SHAPE = header('{"w":{"dtype":"F32","shape":[0,4611686018427387904],"data_offsets":[0,0]}}')


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("w.safetensors", b"no", "w.safetensors: not a complete .safetensors file (.*); download it again"),
        ("w.safetensors", OF_FLOAT4, "w.safetensors: conv has dtype F4, which cannot be read; save it as F32 or BF16$"),
        ("w.safetensors", EMPTY_OF_HUGE_SHAPE, r"w.safetensors: not a complete .safetensors file \(array is too big"),
        ("w.npz", b"no", "w.npz: weights cannot be read from this kind of file; give a .safetensors file, a .pth"),
        ("runs/absent.pth", None, "runs/absent.pth: no such file; give a .safetensors file"),
        (".", None, "not the work directory of a run: it has no folder checkpoints/; give a .safetensors"),
    ],
)
def test_a_bad_file_raises_a_one_line_error(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        prepare_training(SmallNet(), random_table(20), 1, sgd(0.1), 8, weights=tmp_path / name)
