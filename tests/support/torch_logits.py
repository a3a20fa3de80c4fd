"""Writes the logits of torchvision and timm for `published.py`. It must run where both libraries are installed.

    python tests/support/torch_logits.py                          adds the networks that tests/support/published.json
                                                                  lacks, and writes published_positions.json
    python tests/support/torch_logits.py resnet18 FILE.safetensors...
                                                          loads exported weights strictly and compares with it
    python tests/support/torch_logits.py resnet18 FILE.pth        writes a .pth file of the same weights

The committed files were written with torchvision 0.29 and timm 1.0.31: the ResNets with basic blocks and with
bottlenecks, the ConvNeXts and the ViTs with torch 2.13.0, the EfficientNet-Lites and the networks after them with
2.14.1, and the other networks and the positions with 2.15.0.
"""

import functools
import json
import sys
from importlib.metadata import version
from pathlib import Path

import timm
import timm.layers
import torch
import torchvision.models

from support.published import CLASSES, GOLDEN, POSITIONS, digest, image, positions, weights

ODD = "97x131"
SMALL_VITS = {"small_dinov2": "56x56", "small_clip": "64x64", "small_siglip": "32x32", "small_dinov3": "48x80"}
LARGE_VITS = {
    **{"vit_l16": "large_patch16_224", "vit_h14": "huge_patch14_224", "vit_l14_clip": "large_patch14_clip_224"},
    **{"vit_s14_dinov2": "small_patch14_dinov2", "vit_g14_reg4_dinov2": "giant_patch14_reg4_dinov2"},
    **{"vit_so400m14_siglip": "so400m_patch14_siglip_224", "vit_b16_dinov3": "base_patch16_dinov3"},
    "vit_h16plus_dinov3": "huge_plus_patch16_dinov3",
}
NETWORKS = {
    **{f"resnet{depth}": ("torchvision", f"resnet{depth}", ("224x224", ODD)) for depth in (18, 34, 50, 101, 152)},
    "convnext_tiny": ("torchvision", "convnext_tiny", ("224x224", ODD)),
    "convnext_small": ("torchvision", "convnext_small", (ODD,)),
    "vit_ti16": ("timm", "vit_tiny_patch16_224", ("224x224",)),
    "vit_s16": ("timm", "vit_small_patch16_224", ("224x224",)),
    "vit_b16": ("torchvision", "vit_b_16", ("224x224",)),
    "timm_convnext_tiny": ("timm", "convnext_tiny", (ODD,)),
    "timm_vit_b16": ("timm", "vit_base_patch16_224", ("224x224",)),
    **{
        name: ("torchvision", name, (ODD,))
        for name in ("resnext50_32x4d", "resnext101_32x8d", "wide_resnet50_2", "wide_resnet101_2")
    },
    **{name: ("timm", name, (ODD,)) for name in ("resnet50d", "seresnet50")},
    **{
        f"regnet_y_{size}": ("torchvision", f"regnet_y_{size}", (ODD,))
        for size in ("400mf", "800mf", "1_6gf", "3_2gf", "8gf", "16gf", "32gf")
    },
    **{name: ("torchvision", name, (ODD,)) for name in ("efficientnet_b0", "efficientnet_v2_s", "mobilenet_v3_large")},
    **{f"tf_efficientnet_lite{size}": ("timm", f"tf_efficientnet_lite{size}", (ODD,)) for size in range(5)},
    "efficientnet_lite0": ("timm", "efficientnet_lite0", (ODD,)),
    **{name: ("torchvision", name, ()) for name in ("efficientnet_b2", "efficientnet_b7", "efficientnet_v2_l")},
    **{f"tf_{name}": ("timm", f"tf_{name}", ()) for name in ("efficientnet_b5", "efficientnet_b6")},
    "mobilenet_v2": ("torchvision", "mobilenet_v2", (ODD,)),
    "timm_efficientnet_b0": ("timm", "efficientnet_b0", (ODD,)),
    "tf_efficientnet_b0": ("timm", "tf_efficientnet_b0", (ODD,)),
    "tf_efficientnet_v2_m": ("timm", "tf_efficientnetv2_m", ()),
    "timm_mobilenet_v2_140": ("timm", "mobilenetv2_140", ()),
    "timm_mobilenet_v2_050": ("timm", "mobilenetv2_050", (ODD,)),
    **{f"mobilenet_v4_conv_{size}": ("timm", f"mobilenetv4_conv_{size}", ()) for size in ("medium", "large")},
    "mobilenet_v4_conv_small": ("timm", "mobilenetv4_conv_small", (ODD,)),
    "swin_t": ("torchvision", "swin_t", ("224x224", ODD)),
    "swin_s": ("torchvision", "swin_s", (ODD,)),
    "timm_swin_t": ("timm", "swin_tiny_patch4_window7_224", ("224x224",)),
    "small_swin": ("torchvision", "small_swin", (ODD, "29x60")),
    **{name: ("timm", name, ()) for name in ("resnet18d", "resnet200d", "resnetrs50", "resnetrs420")},
    "small_resnetrs": ("timm", "small_resnetrs", (ODD,)),
    "convnext_base": ("torchvision", "convnext_base", ()),
    **{name: ("timm", name, ()) for name in ("convnextv2_nano", "convnextv2_huge")},
    "small_convnextv2": ("timm", "small_convnextv2", (ODD,)),
    **{name: ("timm", name, ()) for name in LARGE_VITS},
    **{name: ("timm", name, (size,)) for name, size in SMALL_VITS.items()},
}
"""The library, the network's name in it or in `BUILT`, and the sizes of the images. A network without sizes gets no
memory: only the names and shapes of its arrays are written."""
GRIDS = (("4x4", "6x7"), ("7x7", "3x5"), ("2x3", "4x4"), ("14x14", "16x16"))
"""Pairs of grids of position embeddings."""
BUILT = {
    "small_swin": lambda **settings: torchvision.models.SwinTransformer(
        [4, 4], embed_dim=32, depths=[2, 2], num_heads=[1, 2], window_size=[7, 7], **settings
    ),
    "small_resnetrs": functools.partial(timm.create_model, "resnetrs50", layers=(1, 1, 1, 1)),
    "small_convnextv2": functools.partial(
        timm.create_model, "convnextv2_nano", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64)
    ),
    **{name: functools.partial(timm.create_model, f"vit_{vit}", img_size=224) for name, vit in LARGE_VITS.items()},
    **{
        name: functools.partial(timm.create_model, f"vit_{vit}", embed_dim=32, depth=2, num_heads=2, **settings)
        for name, vit, settings in (
            ("small_dinov2", "giant_patch14_reg4_dinov2", {"img_size": 56}),
            ("small_clip", "base_patch32_clip_quickgelu_224", {"img_size": 64}),
            ("small_siglip", "so400m_patch16_siglip_256", {"img_size": 32}),
            ("small_dinov3", "small_plus_patch16_dinov3", {}),
        )
    },
}
"""Small networks of a library's classes, which have no name in it, and ViTs for images of 224 pixels."""


def network(name: str) -> torch.nn.Module:
    library, published, sizes = NETWORKS[name]
    create = BUILT.get(published) or functools.partial(
        timm.create_model if library == "timm" else torchvision.models.get_model, published
    )
    with torch.device("cpu" if sizes else "meta"):
        return create(num_classes=CLASSES).double().eval()


def formula(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a network's state with weights by the formula, and its own batch counters."""
    state = module.state_dict()
    made_up = weights({key: tuple(value.shape) for key, value in state.items() if value.is_floating_point()})
    return {**state, **{key: torch.from_numpy(value) for key, value in made_up.items()}}


def logits(module: torch.nn.Module, size: str) -> list[float]:
    height, width = map(int, size.split("x"))
    with torch.no_grad():
        return module(torch.from_numpy(image(height, width).transpose(0, 3, 1, 2).copy()))[0].tolist()


def interpolate(old: str, new: str) -> list:
    """Return `positions` of one grid, such as "4x4", interpolated by timm to another grid."""
    sizes = (list(map(int, grid.split("x"))) for grid in (new, old))
    return timm.layers.resample_abs_pos_embed(torch.from_numpy(positions(old)), *sizes).tolist()


def main(arguments: list[str]) -> None:
    if not arguments:
        results = json.loads(GOLDEN.read_text())
        for name, (library, _, sizes) in NETWORKS.items():
            if name in results:
                continue
            module = network(name)
            if sizes:
                module.load_state_dict(formula(module))
            shapes = {
                key: tuple(value.shape) for key, value in module.state_dict().items() if value.is_floating_point()
            }
            results[name] = {
                "source": f"{library} {version(library)}",
                "arrays": len(shapes),
                "digest": digest(shapes),
                "logits": {size: logits(module, size) for size in sizes},
            }
            print(name, len(shapes), {size: logits[:3] for size, logits in results[name]["logits"].items()})
        GOLDEN.write_text(json.dumps(results, indent=1) + "\n")
        interpolated = {f"{old} to {new}": interpolate(old, new) for old, new in GRIDS}
        POSITIONS.write_text(json.dumps(interpolated) + "\n")
        return
    name, file = arguments[0], Path(arguments[1])
    module = network(name)
    if file.suffix == ".pth":
        torch.save(formula(module), file)
        return
    from safetensors.torch import load_file

    module.load_state_dict(load_file(file))
    for size in NETWORKS[name][2]:
        expected = json.loads(GOLDEN.read_text())[name]["logits"][size]
        differences = (abs(a - b) for a, b in zip(logits(module, size), expected, strict=True))
        print(f"{name} {size}: largest difference {max(differences):.2g}")


if __name__ == "__main__":
    main(sys.argv[1:])
