"""Every family of networks: N devices equal one, the network can be exported as a program, its arrays have the
published names and its logits the published values, and the configs that name it run a step. Each
family has a separate test file."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from support.cases import essential_and_rare, rare_case
from support.data import random_table
from support.ilsvrc import write_tree
from support.networks import largest_difference, make_shallow, randomized
from support.published import CLASSES, digest, golden, image, weights
from support.runs import recipe_of, setup_of
from support.shared import interned, sgd

from jaxddp.augment.preprocess import Preprocess
from jaxddp.config import Config, load
from jaxddp.config.registry import MODELS
from jaxddp.engine.state import TrainState
from jaxddp.inference.exports import export_program
from jaxddp.inference.trained import TrainedRun
from jaxddp.mesh import Topology
from jaxddp.models.activations import activation, find_layer, heat_map_layer
from jaxddp.models.adapt import adapt, for_platform
from jaxddp.models.convnext import ConvNeXt, ConvNeXtSize
from jaxddp.models.interface import shapes_of, takes_example_keys
from jaxddp.models.resnet import ARCHITECTURES, ResNet
from jaxddp.models.swin import Swin
from jaxddp.models.vit import SIZES, ViT
from jaxddp.recipe.sources import config_names
from jaxddp.setup.initial_weights import WeightsTarget, initial_weights
from jaxddp.setup.run_setup import initialize
from jaxddp.setup.run_training import make_run
from jaxddp.training.loop import fit
from jaxddp.weights.match import namings_of, published
from jaxddp.weights.state_dict import write
from jaxddp.workdir.signature import Signature

FAMILIES: dict[str, dict[str, Any]] = {
    "resnet50": {"width": 2, "stem": "small", "batch_norm": "sync"},
    "vit_ti16": {"drop_path": 0.5},
    "convnext_tiny": {"drop_path": 0.5},
    "regnet_y_400mf": {"batch_norm": "sync"},
    "efficientnet_b0": {"drop_path": 0.5, "dropout": 0.5, "batch_norm": "sync"},
    "mobilenet_v3_large": {"dropout": 0.5, "batch_norm": "sync"},
    "swin_t": {"drop_path": 0.5},
    "airbench": {"width": 2, "batch_norm": "sync"},
}
"""One name of each family, with the config that it needs."""
SLOW_PROGRAMS = ("resnet50", "swin_t", "mobilenet_v3_large")
"""Families whose ONNX programs take seconds to create, even if they are shallow, or resemble another family's."""
SMALLER = {
    # Its second block is skipped.
    "convnext_tiny": {"size": ConvNeXtSize((1, 1, 0, 0), 8)},
    # Its second block is shifted and skipped.
    "swin_t": {"stage_sizes": (2, 1), "width": 32},
}
"""Changes of networks that train on several devices."""
UNTRAINED = {
    "airbench": {"whiten/kernel"},
    # The next layer is a 1x1 convolution, whose batch norm subtracts the bias again.
    "mobilenet_v3_large": {"block15/project/norm/bias"},
}
TABLE = random_table(30, image=32)
NAMES, SHAPE = TABLE.class_names, TABLE.images.shape[1:]


@pytest.fixture
def shallow(monkeypatch):
    make_shallow(monkeypatch)


def module_of(name: str, **changes: Any) -> Any:
    """Build the network of a config."""
    config = Config().replace(model={"name": name, **FAMILIES[name]}, train={"precision": "float32"})
    return MODELS.get(name)(config, len(NAMES)).clone(**changes)


def test_every_network_is_of_a_family():
    of_the_families = {type(module_of(name)) for name in FAMILIES}
    assert {type(MODELS.get(name)(Config(), CLASSES)) for name in MODELS.names()} == of_the_families


@functools.cache
def trained(name: str, devices: int) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """For a shallow network, return the parameters before and after 3 steps in float64, and each step's sums."""
    with jax.enable_x64(True):
        module = module_of(name, dtype="float64", param_dtype="float64", **SMALLER.get(name, {}))
        setup = setup_of(module, sgd(0.05), TABLE, devices=devices)
        before = jax.device_get(randomized(setup.state.params))
        # airbench has Flax's batch norm, which starts in float32.
        statistics = jax.tree.map(lambda leaf: leaf.astype("float64"), setup.state.model_state)
        state, sums = setup.topology.replicate(setup.state.replace(params=before, model_state=statistics)), []
        step = setup.step()
        for batch in setup.batches(0, 3):
            state, results = step(state, batch)
            sums.append(np.asarray(results.values))
        return before, jax.device_get((state.params, state.model_state)), sums


@pytest.mark.slow
@pytest.mark.parametrize("devices", essential_and_rare((4,), 2, 8))
@pytest.mark.parametrize(
    "name",
    # Only statistics, skipped branches and dropout depend on devices: a ResNet shows the first, an EfficientNet all.
    [
        "resnet50",
        *(pytest.param(name, marks=pytest.mark.ci) for name in ("airbench", "efficientnet_b0")),
        *map(rare_case, ("vit_ti16", "convnext_tiny", "swin_t", "regnet_y_400mf", "mobilenet_v3_large")),
    ],
)
def test_any_number_of_devices_equals_one(name, devices, shallow):
    """Each image skips blocks by its own key, and batch statistics are those of all devices."""
    before, after, sums = trained(name, 1)
    _, others, theirs = trained(name, devices)
    np.testing.assert_allclose(theirs, sums, rtol=1e-9)
    assert largest_difference(others, after) < 1e-9
    is_unchanged = jax.tree.map(lambda one, other: np.abs(one - other).max() < 1e-7, before, after[0])
    unchanged = {
        jax.tree_util.keystr(path, simple=True, separator="/") for path, is_same in leaves(is_unchanged) if is_same
    }
    assert unchanged == UNTRAINED.get(name, set())


def leaves(tree: Any) -> list:
    return jax.tree_util.tree_leaves_with_path(tree)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "onnx") for name in FAMILIES if name not in SLOW_PROGRAMS)]
    + [("vit_ti16", "stablehlo"), ("vit_ti16", "savedmodel"), rare_case("convnext_tiny", "tflite")]
    + [pytest.param(name, "onnx", marks=pytest.mark.ci) for name in SLOW_PROGRAMS]
    + [rare_case(name, "stablehlo") for name in FAMILIES if name != "vit_ti16"],
)
def test_every_family_becomes_a_program(form, name, tmp_path, shallow):
    """Export fresh networks; `export_program` itself compares the results."""
    report = export_program(fresh_run(name, tmp_path), tmp_path / f"net.{form}", form)
    assert "of the network's; classes and sizes in" in report
    assert json.loads((tmp_path / f"net.{form}.json").read_text())["short_side"] == SHAPE[0]


def fresh_run(name: str, place: Path) -> TrainedRun:
    """Return the work directory of a run without steps."""
    model = adapt(module_of(name))
    params, model_state = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, *SHAPE)))
    state = TrainState(jnp.zeros((), jnp.int32), params, model_state, ())
    signature = Signature(NAMES, NAMES, SHAPE, "uint8", True)
    return TrainedRun(place, 0, Config(), model, state, Preprocess(), signature, Topology.create(1))


SECOND = ("vit_b16", "timm_convnext_tiny", "timm_swin_t", "timm_efficientnet_b0")
SECOND += ("timm_mobilenet_v2_050", "timm_mobilenet_v2_140")
"""Networks whose arrays are checked under the second of their published namings."""
NAMED = (
    *("resnet18", "resnet50", "resnext50_32x4d", "resnet50d", "seresnet50", "vit_ti16", "vit_b16", "convnext_tiny"),
    *("timm_convnext_tiny", "regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s", "mobilenet_v3_large"),
    *("tf_efficientnet_lite0", "tf_efficientnet_b0", "timm_efficientnet_b0", "mobilenet_v2", "timm_mobilenet_v2_050"),
    *("mobilenet_v4_conv_small", "swin_t", "timm_swin_t"),
)
"""One network for each kind of block and each naming; the others differ only in sizes."""
BUILT = {
    "small_swin": Swin((2, 2), CLASSES, width=32),
    "small_resnetrs": ResNet(replace(ARCHITECTURES["resnetrs50"], stage_sizes=(1, 1, 1, 1)), CLASSES, stem="deep"),
    "small_convnextv2": ConvNeXt(ConvNeXtSize((1, 1, 1, 1), 8, response_norm=True, convolutions=True), CLASSES),
    **{
        name: ViT(replace(SIZES[vit], width=32, heads=2, blocks=2, hidden=hidden), CLASSES)
        for name, vit, hidden in (
            ("small_dinov2", "vit_g14_reg4_dinov2", 85),
            ("small_clip", "vit_b32_clip_quickgelu", None),
            ("small_siglip", "vit_so400m16_siglip", 119),
            ("small_dinov3", "vit_s16plus_dinov3", None),
        )
    },
}
"""Small networks of the class of a larger one, which has a name."""


def network(name: str) -> Any:
    return BUILT[name] if name in BUILT else MODELS.get(name.removeprefix("timm_"))(Config(), CLASSES)


@functools.cache
def shapes(name: str, height: int, width: int) -> dict[str, tuple[int, ...]]:
    return shapes_of(adapt(network(name)), (height, width, 3))


def state_dict_of(name: str, height: int, width: int) -> dict[str, Any]:
    """Return zeros with the published names and shapes, which take no memory."""
    zeros = {path: np.broadcast_to(np.float32(0), shape) for path, shape in shapes(name, height, width).items()}
    return published(zeros, namings_of(adapt(network(name)))[name in SECOND])


@pytest.mark.parametrize("name", essential_and_rare(NAMED, *(name for name in golden() if name not in NAMED)))
def test_arrays_have_the_published_names_and_shapes(name):
    sides = next(iter(golden()[name]["logits"])) if name in BUILT else "224x224"
    results = {each: array.shape for each, array in state_dict_of(name, *map(int, sides.split("x"))).items()}
    assert len(results) == golden()[name]["arrays"]
    assert digest(results) == golden()[name]["digest"]


@functools.cache
def logits_by(module: Any) -> Any:
    return jax.jit(lambda variables, images: module.apply(variables, images))


def logits(name: str, file: Path, size: str, dtype: str) -> Any:
    height, width = map(int, size.split("x"))
    model = for_platform(adapt(network(name).clone(dtype=dtype, param_dtype=dtype)), "cpu")
    arrays = initial_weights(file, WeightsTarget(model, (height, width, 3), CLASSES), Topology.create(1))
    images = jnp.asarray(image(height, width), dtype)
    return np.asarray(logits_by(model.module)(variables_of(arrays, dtype), images))[0]


def variables_of(arrays: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Return the variables of a Linen module from its arrays by path."""
    return unflatten_dict({path: jnp.asarray(array, dtype) for path, array in arrays.items()}, sep="/")


ESSENTIAL = [
    ("resnet18", "97x131", "float64"),
    ("vit_ti16", "224x224", "float64"),
    # On images of 29x60 pixels one axis has a single window, which is not shifted.
    *(("small_swin", size, "float64") for size in ("97x131", "29x60")),
    *(
        ("small_convnextv2", "97x131", "float64"),
        ("small_dinov2", "56x56", "float64"),
        ("small_clip", "64x64", "float64"),
    ),
    *(("small_siglip", "32x32", "float64"), ("small_dinov3", "48x80", "float64")),
]
"""The smallest network of each kind."""
# Larger networks, or slow to compile; `test_arrays_have_the_published_names_and_shapes` has their names.
LARGE = [("vit_b16", "224x224", "float64"), ("swin_t", "97x131", "float64"), ("resnet18", "97x131", "float32")]
LARGE += [("small_resnetrs", "97x131", "float64"), ("tf_efficientnet_lite0", "97x131", "float32")]
LARGE += [
    (name, "97x131", "float64")
    for name in (
        *("resnet50", "resnext50_32x4d", "resnet50d", "seresnet50", "convnext_tiny"),
        *("regnet_y_400mf", "efficientnet_b0", "efficientnet_v2_s", "mobilenet_v3_large", "timm_convnext_tiny"),
        *("tf_efficientnet_lite0", "tf_efficientnet_b0", "mobilenet_v2", "mobilenet_v4_conv_small"),
    )
]
OTHERS = [(name, size, "float64") for name in golden() for size in golden()[name]["logits"]]
OTHERS = [case for case in [*OTHERS, ("resnet50", "97x131", "float32")] if case not in [*ESSENTIAL, *LARGE]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "precision"),
    [
        *ESSENTIAL,
        *(pytest.param(*case, marks=pytest.mark.ci) for case in LARGE),
        *(rare_case(*case) for case in OTHERS),
    ],
)
def test_logits_are_the_published_ones(tmp_path, name, size, precision):
    """Redraw every array, and pass the weights through a file with the names of torchvision or timm."""
    height, width = map(int, size.split("x"))
    like = {each: array.shape for each, array in state_dict_of(name, height, width).items()}
    write(tmp_path / "w.safetensors", weights(like))
    with jax.enable_x64(precision == "float64"):
        results = logits(name, tmp_path / "w.safetensors", size, precision)
    difference = np.abs(results - golden()[name]["logits"][size]).max()
    print(f"{name} {size} {precision}: {difference:.2g}")
    assert difference < {"float64": 1e-9, "float32": 1e-4}[precision]


WITH_A_FIRST_CONVOLUTION = [name for name in FAMILIES if name != "airbench"]
"""Families whose weights fit images with other channels. The first kernel of airbench is computed from the images."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "vit_ti16",
        *(pytest.param(name, marks=pytest.mark.ci) for name in WITH_A_FIRST_CONVOLUTION if name != "vit_ti16"),
    ],
)
def test_a_network_of_gray_images_takes_weights_for_rgb_images(tmp_path, name, shallow):
    """Its logits equal those of the network of RGB images for three equal channels."""
    with jax.enable_x64(True):
        module = module_of(name, dtype="float64", param_dtype="float64")
        rgb = shapes_of(adapt(module), (*SHAPE[:2], 3))
        zeros = {path: np.broadcast_to(np.float32(0), shape) for path, shape in rgb.items()}
        like = {each: array.shape for each, array in published(zeros, namings_of(adapt(module))[0]).items()}
        file, topology = tmp_path / "w.safetensors", Topology.create(1)
        write(file, weights(like))
        images = np.random.default_rng(0).standard_normal((2, *SHAPE[:2], 1))
        results = []
        for channels in (3, 1):
            target = WeightsTarget(adapt(module), (*SHAPE[:2], channels), len(NAMES))
            arrays = initial_weights(file, target, topology)
            inputs = jnp.asarray(np.broadcast_to(images, (*images.shape[:3], channels)))
            results.append(np.asarray(logits_by(module)(variables_of(arrays, "float64"), inputs)))
    assert np.std(results[0]) > 1e-3
    assert largest_difference(*results) < 1e-9


ESSENTIAL_CONFIGS = {
    "fashion_mnist": "a constant rate, shortcuts without a norm",
    "finetune_folder": "new layers, rates by layer, crops of a random area",
    "imagenet_resnet50_mild": "images that grow, blurred strides, binary cross entropy, an evaluation of another size",
    "imagenet_vit_s16": "a ViT; RandAugment and Mixup",
}
"""These configs, and configs with a separate test (`test_cifar10_fast.py`), use the pieces of all others.
`test_the_network_of_every_config_has_an_output_for_each_class` shows that each is a complete recipe."""


CONFIGS_OF_OTHER_NUMBERS = {
    "cifar100": "cifar10",
    "cifar10_fast_sgd": "cifar10_fast",
    "imagenet_resnet18_ffcv_16": "imagenet_resnet50_ffcv_16",
    "imagenet_resnet50_ffcv_88": "imagenet_resnet50_ffcv_16",
    "imagenet_resnet34": "imagenet_resnet50",
}
"""Configs that differ from another config only in numbers, if the networks are as shallow as here."""


def config_cases() -> list:
    others = [name for name in config_names() if name not in ESSENTIAL_CONFIGS | CONFIGS_OF_OTHER_NUMBERS]
    return [
        *essential_and_rare((*ESSENTIAL_CONFIGS,), *CONFIGS_OF_OTHER_NUMBERS),
        *(pytest.param(name, marks=pytest.mark.ci) for name in others),
    ]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return write_tree(tmp_path_factory.mktemp("ilsvrc"), classes=3, images=4, val=2, size=40)


def make_small(name: str, pictures, images: int) -> Config:
    """Return a config for this number of images a step on each of two devices, otherwise unchanged."""
    config = load(name)
    grouped = config.model.batch_statistics.group is not None
    return config.replace(
        data={"path": str(pictures)},
        model={"batch_norm": f"ghost:{images}"} if grouped else {},
        train={"batch_size": 2 * images},
        optimizer={"warmup": "0 steps"},
        eval={"batch_size": 2 * images},
        parallel={"devices": 2},
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", config_cases())
def test_every_config_takes_a_step(name, pictures, shallow):
    """Build a shallow network for 32 pixels."""
    config = make_small(name, pictures, images=2)
    sizes = {"grow_from": config.data.grow_from and 16, "grow_by": 4, "eval_size": config.data.eval_size and 40}
    config = config.replace(
        data={"image_size": 32, "resize": 40, **sizes},
        model={} if config.model.name in ("vit_s16", "convnext_tiny", "swin_t") else {"width": 2},
        train={"duration": "1 step"},
        objective={"unlabelled_ratio": 2},
        parallel={"self_test": "never"},
    )
    setup = initialize(recipe_of(config))
    before = jax.device_get(setup.state.params)
    state = fit(make_run(setup))
    after = jax.device_get(state.params)
    head = "fc" if "fc" in after else "head"
    assert int(state.step) == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert after[head]["kernel"].shape[-1] == setup.resources.train.num_classes == 3
    assert not np.array_equal(before[head]["kernel"], after[head]["kernel"])


@functools.cache
def logits_in_training(model: Any, size: int) -> tuple[int, ...]:
    """Return the shape of the logits for four images of this size."""
    images, key = jax.ShapeDtypeStruct((4, size, size, 3), np.float32), jax.random.key(0)
    params, model_state = jax.eval_shape(model.init, key, images)
    changes = {"example_keys": jax.random.split(key, 4)} if takes_example_keys(model) else {}
    apply = functools.partial(model.apply, train=True)
    return jax.eval_shape(apply, params, model_state, images, key=key, **changes)[0].shape


@pytest.mark.parametrize("name", config_names())
def test_the_network_of_every_config_has_an_output_for_each_class(name, pictures, shallow):
    """Test each network at the size of its images. Deeper ones have the same shapes."""
    config = make_small(name, pictures, images=4).replace(objective={"unlabelled_ratio": 1})
    if config.data.grow_from:
        # Only the first and the last of the image sizes are tested.
        config = config.replace(data={"grow_by": config.data.image_size - config.data.grow_from})
    model = interned(recipe_of(config).model)
    assert logits_in_training(model, config.data.image_size) == (4, 3)


def test_every_family_has_a_config():
    named = {type(MODELS.get(load(name).model.name)(Config(), CLASSES)) for name in config_names()}
    assert named == {type(module_of(name)) for name in FAMILIES}


HEAD_FACTORS = {"airbench": lambda features: 1 / features.shape[-1]}
"""The factors of logits after the last dense layer, for networks that have one."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_head_of_the_features_gives_the_logits(name, shallow):
    """Without a name of a layer, the features of every family are the input of its last dense layer."""
    with jax.enable_x64(True):
        model = adapt(module_of(name, dtype="float64", param_dtype="float64"))
        images = jax.random.normal(jax.random.key(1), (3, *SHAPE), "float64")
        params, state = jax.jit(model.init)(jax.random.key(0), images[:1])
        params, layer = randomized(jax.device_get(params)), find_layer(model, SHAPE)

        @jax.jit
        def outputs(*arrays):
            return activation(model, layer, *arrays), model.apply(*arrays, train=False, key=None)[0]

        (logits, features), plain = outputs(params, state, images)
        assert features.shape == (3, *layer.shape) and features.ndim == 2
        head = params[layer.path]
        expected = (features @ head["kernel"] + head.get("bias", 0)) * HEAD_FACTORS.get(name, lambda _: 1)(features)
        assert np.abs(logits).max() > 1e-3 and np.allclose(expected, logits, rtol=1e-9, atol=1e-9)
        assert np.allclose(logits, plain, rtol=1e-9, atol=1e-9)
        assert len(heat_map_layer(model, SHAPE).shape) in (2, 3)
