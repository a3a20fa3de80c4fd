"""Write jaxddp/weights/published.csv, the list of the weights that torchvision and timm publish.

    python benchmarks/published_weights.py RESULTS

The interpreter needs torchvision and timm. RESULTS is the file results/results-imagenet.csv of the repository
huggingface/pytorch-image-models, which has the accuracies of timm's weights. torchvision's are in its metadata.

To add a family, add a line to `FAMILIES`, and run the program again.
"""

import csv
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
import torchvision

OUT = Path(__file__).parent.parent / "jaxddp/weights/published.csv"
IMAGENET = 1000
COLUMNS = ("name", "network", "image_size", "resize", "eval_crop", "interpolation", "mean", "std")
COLUMNS += ("top1", "parameters", "file")
FAMILIES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "resnet18": ("resnet18", ("resnet18",)),
    "resnet34": ("resnet34", ("resnet34",)),
    "resnet50": ("resnet50", ("resnet50",)),
    "resnet101": ("resnet101", ("resnet101",)),
    "resnet152": ("resnet152", ("resnet152",)),
    "vit_ti16": (None, ("vit_tiny_patch16_224", "vit_tiny_patch16_384", "deit_tiny_patch16_224")),
    "vit_s8": (None, ("vit_small_patch8_224",)),
    "vit_s16": (None, ("vit_small_patch16_224", "vit_small_patch16_384", "deit_small_patch16_224")),
    "vit_s32": (None, ("vit_small_patch32_224", "vit_small_patch32_384")),
    "vit_b8": (None, ("vit_base_patch8_224",)),
    "vit_b16": (
        "vit_b_16",
        ("vit_base_patch16_224", "vit_base_patch16_384", "deit_base_patch16_224", "deit_base_patch16_384"),
    ),
    "vit_b32": ("vit_b_32", ("vit_base_patch32_224", "vit_base_patch32_384")),
    "vit_l16": ("vit_l_16", ("vit_large_patch16_224", "vit_large_patch16_384")),
    "vit_l32": ("vit_l_32", ("vit_large_patch32_224", "vit_large_patch32_384")),
    "vit_h14": ("vit_h_14", ("vit_huge_patch14_224",)),
    **{
        f"vit_{size[0]}14_{kind}": (None, (f"vit_{size}_patch14_{kind}",))
        for size in ("small", "base", "large", "giant")
        for kind in ("dinov2", "reg4_dinov2")
    },
    **{
        f"vit_{size[0]}{patch}_clip{quick}": (
            None,
            tuple(f"vit_{size}_patch{patch}_clip{quick}_{side}" for side in (224, 256, 336, 378, 384, 448)),
        )
        for size, patch in (("base", 32), ("base", 16), ("large", 14), ("huge", 14))
        for quick in ("", "_quickgelu")
    },
    # timm cuts images of 384 pixels for patches of 14, and has another activation for L/16 at 512 pixels.
    **{
        f"vit_{short}{patch}_siglip": (None, tuple(f"vit_{size}_patch{patch}_siglip_{side}" for side in sides))
        for short, size, patch, sides in (
            *(("b", "base", 32, (256,)), ("b", "base", 16, (224, 256, 384, 512)), ("l", "large", 16, (256, 384))),
            *(("so400m", "so400m", 14, (224, 378)), ("so400m", "so400m", 16, (256, 384, 512))),
        )
    },
    **{
        f"vit_{short}_dinov3": (None, (f"vit_{size}_dinov3",))
        for short, size in (
            *(("s16", "small_patch16"), ("s16plus", "small_plus_patch16"), ("b16", "base_patch16")),
            *(("l16", "large_patch16"), ("h16plus", "huge_plus_patch16")),
        )
    },
    **{name: (name, (name,)) for name in ("convnext_tiny", "convnext_small", "convnext_base", "convnext_large")},
    **{
        f"convnext{name}": (None, (f"convnext{name}",))
        for name in (
            *("_atto", "_femto", "_pico", "_nano", "_xlarge", "v2_atto", "v2_femto", "v2_pico", "v2_nano", "v2_tiny"),
            *("v2_base", "v2_large", "v2_huge"),
        )
    },
    "resnext50_32x4d": ("resnext50_32x4d", ("resnext50_32x4d",)),
    "resnext101_32x8d": ("resnext101_32x8d", ("resnext101_32x8d",)),
    "wide_resnet50_2": ("wide_resnet50_2", ("wide_resnet50_2",)),
    "wide_resnet101_2": ("wide_resnet101_2", ("wide_resnet101_2",)),
    "seresnet50": (None, ("seresnet50",)),
    **{f"resnet{depth}d": (None, (f"resnet{depth}d",)) for depth in (18, 26, 34, 50, 101, 152, 200)},
    **{f"resnetrs{depth}": (None, (f"resnetrs{depth}",)) for depth in (50, 101, 152, 200, 270, 350, 420)},
    # timm's arrays of the next networks have other names, or its batch norms have another epsilon.
    **{
        f"regnet_y_{size}": (f"regnet_y_{size}", ())
        for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")
    },
    **{f"efficientnet_{size}": (f"efficientnet_{size}", ()) for size in ("b5", "b6", "b7", "v2_s", "v2_m", "v2_l")},
    "mobilenet_v3_large": ("mobilenet_v3_large", ()),
    **{f"efficientnet_b{size}": (f"efficientnet_b{size}", (f"efficientnet_b{size}",)) for size in range(5)},
    **{f"tf_efficientnet_b{size}": (None, (f"tf_efficientnet_b{size}",)) for size in range(8)},
    **{f"tf_efficientnet_v2_{size}": (None, (f"tf_efficientnetv2_{size}",)) for size in "sml"},
    "mobilenet_v2": ("mobilenet_v2", ("mobilenetv2_100",)),
    **{f"mobilenet_v2_{width}": (None, (f"mobilenetv2_{width}",)) for width in ("050", "140")},
    **{f"mobilenet_v4_conv_{size}": (None, (f"mobilenetv4_conv_{size}",)) for size in ("small", "medium", "large")},
    "efficientnet_lite0": (None, ("efficientnet_lite0",)),
    **{f"tf_efficientnet_lite{size}": (None, (f"tf_efficientnet_lite{size}",)) for size in range(5)},
    "swin_t": ("swin_t", ("swin_tiny_patch4_window7_224",)),
    "swin_s": ("swin_s", ("swin_small_patch4_window7_224",)),
}
"""By network of jaxddp: the name of torchvision's function, if any, and timm's names of networks with equal arrays."""


def of_torchvision(network: str, builder: str) -> Iterator[tuple]:
    """Yield a row for each weights of a function of torchvision, the default first."""
    kinds = torchvision.models.get_model_weights(builder)
    for weights in sorted(kinds, key=lambda weights: weights is not kinds.DEFAULT):
        images, meta = weights.transforms(), weights.meta
        yield (
            *(f"torchvision/{type(weights).__name__}.{weights.name}", network),
            *(images.crop_size[0], images.resize_size[0], "center", images.interpolation.value),
            *(numbers(images.mean), numbers(images.std)),
            *(meta["_metrics"]["ImageNet-1K"]["acc@1"], round(meta["num_params"] / 1e6, 2)),
            weights.url.rpartition("/")[2],
        )


def of_timm(network: str, builder: str, results: dict[tuple[str, int], dict[str, str]]) -> Iterator[tuple]:
    """Yield a row for each weights of a network of timm, the default first.

    Weights for ImageNet's classes need an accuracy at their image size. Others have none: without a head, or with a
    head of other classes.
    """
    if not (names := timm.list_pretrained(f"{builder}.*")):
        return
    default = timm.models.get_pretrained_cfg(builder).tag
    for name in sorted(names, key=lambda name: (name != f"{builder}.{default}", name)):
        config = timm.models.get_pretrained_cfg(name)
        size = config.input_size[-1]
        row = results.get((name, size))
        if timm.list_pretrained(name.replace("_clip_", "_clip_quickgelu_")) not in ([], [name]):
            continue  # These weights were trained with the other activation.
        if (row is None and config.num_classes == IMAGENET) or not config.hf_hub_id.startswith("timm/"):
            print(f"{name}: no accuracy for images of {size} pixels, or not in timm's repositories", file=sys.stderr)
            continue
        resize = math.floor(size / float(row["crop_pct"] if row else config.crop_pct))
        pixels = (size, resize, config.crop_mode, config.interpolation, numbers(config.mean), numbers(config.std))
        parameters = float(row["param_count"]) if row else parameter_count(name, config.num_classes)
        yield (config.hf_hub_id, network, *pixels, float(row["top1"]) if row else "", parameters, "")


def parameter_count(name: str, num_classes: int) -> float:
    """Return the number of parameters of a network of timm in millions."""
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=num_classes)
    return round(sum(array.numel() for array in model.parameters()) / 1e6, 2)


def numbers(values: list[float] | tuple[float, ...]) -> str:
    """Return numbers as text, with spaces between them."""
    return " ".join(f"{value:g}" for value in values)


def main(results_file: str) -> None:
    """Write the list."""
    with open(results_file, newline="") as file:
        results = {(row["model"], int(row["img_size"])): row for row in csv.DictReader(file)}
    rows = []
    for network, (builder, timm_builders) in FAMILIES.items():
        rows += of_torchvision(network, builder) if builder else []
        rows += [row for name in timm_builders for row in of_timm(network, name, results)]
    with OUT.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
