"""The ImageNet recipes have the numbers of their sources; their docstrings describe the remaining differences."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxddp.cli import main
from jaxddp.config import Config, load
from jaxddp.config.registry import MODELS
from jaxddp.data.batch import Growth
from jaxddp.kernels import BY_NAME, path_of
from jaxddp.models.adapt import adapt
from jaxddp.optimizers import AdamW, Lamb, Lars, SgdWithMomentum
from jaxddp.schedules import make_schedule
from jaxddp.training.plan import Plan

IMAGES = 1_281_167
COMPARED = ("batch_size", "duration", "learning_rate", "schedule", "warmup", "warmup_start", "reference_batch")
COMPARED += ("end_factor", "step_at", "step_factor", "image_size", "grow_from", "grow_start", "grow_end", "grow_by")
"""Settings that are compared by their effect, the learning rate and the side of the images."""
TIMM = {"interpolation": "bicubic", "rand_augment": 2, "rand_operations": "timm", "rand_probability": 0.5}
TIMM |= {"rand_deviation": 0.5, "cutmix": 1.0}
M9 = {**TIMM, "mixup": 0.8, "erase": 0.25, "erase_area": [0.02, 1 / 3], "erase_fill": "noise", "label_smoothing": 0.1}
M9 |= {"optimizer.name": "adamw", "weight_decay": 0.05}
RMSPROP = {"optimizer.name": "rmsprop", "momentum": 0.9, "beta2": 0.9, "epsilon": 0.0316, "weight_decay": 1e-5}
RMSPROP |= {"policy": "auto_augment_imagenet", "dropout": 0.2}
BLURRED = {"nesterov": False, "blur_pool": True, "zero_init_last_scale": False}
FFCV = {**BLURRED, "eval_size": 256, "resize": 293, "label_smoothing": 0.1, "views": "mirror"}


def line(epoch, *points):
    return np.interp(epoch, points[::2], points[1::2])


def cosine(epoch, begin, end, peak, last=0.0):
    return last + (peak - last) * (1 + math.cos(math.pi * (epoch - begin) / (end - begin))) / 2


def warm(warmup, first, peak, then):
    return lambda epoch: line(epoch, 0, first, warmup, peak) if epoch < warmup else then(epoch)


def ffcv(batch, epochs, peak, start, end, **settings):
    side = lambda epoch: 32 * round(line(math.floor(epoch), start, 160, end, 192) / 32)  # noqa: E731
    return batch, epochs, lambda epoch: line(epoch, 0, 1e-4 * peak, 2, peak, epochs, 0), side, FFCV | settings


# fmt: off
SOURCES = {
    # arXiv:1706.02677, sections 2.2, 3 and 5.1; then a variant.
    "resnet50_goyal": (8192, 90, warm(5, 0.1, 3.2, lambda e: 3.2 * 0.1 ** sum(e >= at for at in (30, 60, 80))), 224,
        {"batch_norm": "ghost:32"}),
    "resnet50": (256, 90, warm(4.5, 0, 0.1, lambda e: cosine(e, 4.5, 90, 0.1)), 224, {"label_smoothing": 0.1}),
    # arXiv:2110.00476, table 2, and train.py of timm in October 2021.
    "resnet50_a3": (2048, 100, warm(5, 1e-4, 8e-3, lambda e: cosine(e, 0, 100, 8e-3, 1e-6)), 160,
        {**TIMM, "optimizer.name": "lamb", "loss.name": "bce", "weight_decay": 0.02, "clip_norm": 1.0, "mixup": 0.1,
         "rand_magnitude": 6.0, "eval_size": 224, "resize": math.floor(224 / 0.95)}),
    # github.com/libffcv/ffcv-imagenet: train_imagenet.py and the files of rn50_configs and rn18_configs.
    "resnet50_ffcv_16": ffcv(4096, 16, 1.7, 11, 13),
    "resnet50_ffcv_88": ffcv(4096, 88, 1.7, 65, 76),
    "resnet18_ffcv_16": ffcv(1024, 16, 0.5, 11, 13, weight_decay=5e-5, **{"model.name": "resnet18"}),
    # github.com/tensorflow/tpu, models/official/resnet: lars_util.py and configs/resnet_config.py.
    "resnet50_lars": (32_768, 90, warm(14, 0, 32, lambda e: 1e-4 + (32 - 1e-4) * ((90 - e) / 76) ** 2), 224,
        {"optimizer.name": "lars", "nesterov": False, "batch_norm": "ghost:64"}),
    # github.com/mosaicml/examples, blogs/resnet/recipes/resnet50_mild.yaml, and the schedules of mosaicml/composer.
    "resnet50_mild": (2048, 32, warm(8, 0, 2.048, lambda e: cosine(e, 8, 32, 2.048)),
        lambda e: 4 * round(176 / 4 * line(e / 32, 0.4, 0.5, 0.8, 1)),
        {**BLURRED, "momentum": 0.875, "weight_decay": 5e-4, "label_smoothing": 0.08, "ema": 0.5**0.01, "ema_every": 20,
         "ema_warmup": False, "eval_size": 224, "resize": 232}),
    # github.com/google-research/big_vision, configs/vit_s16_i1k.py; its weight decay divided by its learning rate.
    "vit_s16": (1024, 90, warm(7.993, 0, 1e-3, lambda e: cosine(e, 7.993, 90, 1e-3)), 224,
        {"model.name": "vit_s16", "optimizer.name": "adamw", "weight_decay": 0.1, "clip_norm": 1.0, "mixup": 0.2,
         "rand_augment": 2, "rand_magnitude": 10.0, "crop_area": [0.05, 1.0], "mean": [0.5] * 3, "std": [0.5] * 3}),
    # github.com/facebookresearch/ConvNeXt: TRAINING.md, main.py and utils.py.
    "convnext_tiny": (4096, 300, warm(20, 0, 4e-3, lambda e: cosine(e, 20, 300, 4e-3, 1e-6)), 224,
        {**M9, "model.name": "convnext_tiny", "drop_path": 0.1, "ema": 0.9999, "ema_warmup": False}),
    # github.com/microsoft/Swin-Transformer: config.py, main.py, lr_scheduler.py, swin_tiny_patch4_window7_224.yaml.
    "swin_t": (1024, 300, warm(20, 1e-6, 1e-3, lambda e: cosine(e, 20, 300, 1e-3, 1e-5)), 224,
        {**M9, "model.name": "swin_t", "drop_path": 0.2, "clip_norm": 5.0}),
    # github.com/facebookresearch/pycls: RegNetY-400MF_dds_8gpu.yaml, core/config.py and core/optimizer.py.
    "regnet_y_400mf": (1024, 100, lambda e: cosine(e, 0, 100, 0.8) * line(e, 0, 0.1, 5, 1), 224,
        {"model.name": "regnet_y_400mf", "weight_decay": 5e-5}),
    # github.com/tensorflow/tpu, models/official/efficientnet: main.py and utils.py; arXiv:1905.11946, section 5.2.
    "efficientnet_b0": (4096, 350, warm(5, 0, 0.256, lambda e: 0.256 * 0.97 ** (e // 2.4)), 224,
        {**RMSPROP, "model.name": "efficientnet_b0", "drop_path": 0.2, "label_smoothing": 0.1, "ema": 0.9999,
         "interpolation": "bicubic"}),
    # github.com/pytorch/vision, references/classification, README.md.
    "mobilenet_v3_large": (1024, 600, lambda e: 0.064 * 0.973 ** (e // 2), 224,
        {**RMSPROP, "model.name": "mobilenet_v3_large", "erase": 0.2, "erase_area": [0.02, 0.33]}),
}
"""Batch size, epochs, learning rate and side of the images as functions of the epoch, and other settings."""
# fmt: on


@pytest.mark.parametrize("recipe", SOURCES)
def test_rates_sizes_and_settings_are_those_of_the_source(recipe):
    batch_size, epochs, rate, side, settings = SOURCES[recipe]
    config = load(f"imagenet_{recipe}")
    assert (config.train.batch_size, str(config.train.duration)) == (batch_size, f"{epochs} epochs")
    plan = Plan.of(config, IMAGES)
    middles = [round((epoch + 0.5) * IMAGES / batch_size) for epoch in range(epochs)]
    schedule = jax.jit(jax.vmap(make_schedule(config, plan.schedule_steps(config))))
    *rates, last = np.asarray(schedule(np.array([*middles, plan.total_steps - 1])))
    expected = [rate(plan.epoch(step)) for step in middles]
    # The cosine of two sources begins with the warmup, as the docstrings of their recipes say.
    tolerance = 0.05 if recipe in ("resnet50_a3", "regnet_y_400mf") else 0.002
    np.testing.assert_allclose(rates, expected, rtol=0, atol=tolerance * max(expected))
    assert last == pytest.approx(rate(epochs - 1e-9), rel=1e-3, abs=2 * max(expected) / plan.total_steps)
    growth = Growth.of(config.data, config.data.image_size, **plan.lengths)
    sides = [growth.side(step) if growth else config.data.image_size for step in middles]
    assert sides == [side(plan.epoch(step)) if callable(side) else side for step in middles]
    values, base = config.flat(), Config().flat()
    changed = {key if key.endswith(".name") else key.rpartition(".")[2]: key for key in values}
    changed = {name: values[key] for name, key in changed.items() if values[key] != base[key] and name not in COMPARED}
    assert changed == settings


def test_settings_that_no_recipe_changes_are_those_of_all_sources():
    data, augment, train = Config().data, Config().data.augment, Config().train
    assert (data.crop, data.crop_area, data.resize, data.interpolation) == ("random_area", (0.08, 1), 256, "bilinear")
    assert (augment.flip, augment.color_jitter, augment.mixup, augment.cutmix, augment.erase) == (True, None, 0, 0, 0)
    assert (train.label_smoothing, train.ema, Config().optimizer.weight_decay) == (0, None, 1e-4)
    assert (SgdWithMomentum(), Lars()) == (SgdWithMomentum(0.9, True), Lars(0.9, True, 0.001, 0.0))
    assert (AdamW(), Lamb()) == (AdamW(0.9, 0.999, 1e-8), Lamb(0.9, 0.999, 1e-6))


def test_the_table_of_a_config_leaves_out_the_middle_of_a_long_list(capsys):
    assert main(["config", "imagenet_efficientnet_b0"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "optimizer.step_at" in line)
    assert " … " in line and len(line) < 200


OTHERS = {"swin_t": {"relative_position_bias_table"}, "vit_s16": {"cls_token", "pos_embed"}}
OTHERS |= {"convnext_tiny": {"layer_scale"}, "resnet18": set()}


@pytest.mark.parametrize("network", OTHERS)
def test_biases_norms_and_these_parameters_have_no_weight_decay(network):
    model = adapt(MODELS.get(network)(load("imagenet_resnet50").replace(model={"name": network}), 9))
    params, _ = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    leaves = jax.tree_util.tree_leaves_with_path(BY_NAME.mask(params))
    decays = {(path_of(path).rpartition("/")[2], decays) for path, decays in leaves}
    assert decays == {("kernel", True), *((name, False) for name in {"scale", "bias"} | OTHERS[network])}
