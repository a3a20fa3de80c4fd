"""Networks whose weights others publish: names and shapes of their arrays, their logits, the depth of their layers."""

import jax
import jax.numpy as jnp
import pytest
from flax import traverse_util
from published import CLASSES, digest, golden

from jaxddp.config import Config
from jaxddp.registry import MODELS

SECOND = ("vit_b16", "timm_convnext_tiny")
"""Those for which the file's library has the second naming scheme of the network."""


def network(name):
    return MODELS.get(name.removeprefix("timm_"))(Config(), CLASSES)


def shapes_of(model, size=224):
    """Of our arrays, by path: "params/fc/kernel"."""
    variables = jax.eval_shape(model.init, jax.random.key(0), jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32))
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(dict(variables), sep="/").items()}


def published_shape(path, name, shape):
    """That of a published array, of ours."""
    if path.endswith("kernel"):
        return (shape[3], shape[2], shape[0], shape[1]) if len(shape) == 4 else shape[::-1]
    return (*shape, 1, 1) if name.endswith("layer_scale") else shape


RESNETS = [name for name in golden() if name.startswith("resnet")]


@pytest.mark.parametrize("name", RESNETS)
def test_arrays_have_the_published_names_and_shapes(name):
    model = network(name)
    rename = model.published_names()[name in SECOND]
    shapes = {rename(path): published_shape(path, rename(path), shape) for path, shape in shapes_of(model).items()}
    assert len(shapes) == golden()[name]["arrays"]
    assert digest(shapes) == golden()[name]["digest"]


@pytest.mark.parametrize("name", RESNETS)
def test_depths_grow_from_the_stem_to_the_head(name):
    model = network(name)
    depths = [model.depth_of(path) for path in shapes_of(model) if path.startswith("params/")]
    assert sorted(set(depths)) == list(range(model.depth))
    # Most of a network's first layer and of its last one are in place.
    assert depths.count(0) >= 2
    assert depths.count(model.depth - 1) >= 2


def test_depths_of_a_resnet():
    model = network("resnet50")
    depths = {
        "params/conv1/kernel": 0,
        "batch_stats/bn1/mean": 0,
        "params/layer1_0/downsample_conv/kernel": 1,
        "params/layer1_2/conv3/kernel": 3,
        "params/layer2_0/bn1/scale": 4,
        "params/layer4_2/conv1/kernel": 16,
        "params/fc/bias": 17,
    }
    assert {path: model.depth_of(path) for path in depths} == depths
