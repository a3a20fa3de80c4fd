"""Swin-T on ImageNet, 300 epochs, the recipe of Liu et al. 2021 (arXiv:2103.14030).

    jaxddp train imagenet_swin_t --data.path /data/imagenet

The warmup takes 20 epochs. The norm at which gradients are clipped is that of the source's code
(github.com/microsoft/Swin-Transformer), like the first and the final learning rate, 1e-6 and 1e-5. The cosine begins
after the warmup, as in that code since 2022; for the published accuracy it began before, so it went on from 0.989 of
the peak.

The operations, probabilities and areas of the augmentation are those of timm's "rand-m9-mstd0.5-inc1" and erasing mode
"pixel", which the source uses. timm's warps interpolate bicubically and fill with the mean color; here they take the
nearest neighbour and fill with gray. timm mixes a whole batch with one weight; here each image has its own.

This recipe has not been run at full scale.
"""

from jaxddp.config import Config, Reference

reference = Reference(0.813, "Liu et al. 2021")


def get_config() -> Config:
    return Config().replace(
        data={
            "interpolation": "bicubic",
            "augment": {
                "rand_augment": 2,
                "rand_operations": "timm",
                "rand_probability": 0.5,
                "rand_deviation": 0.5,
                "erase": 0.25,
                "erase_area": (0.02, 1 / 3),
                "erase_fill": "noise",
                "mixup": 0.8,
                "cutmix": 1.0,
            },
        },
        model={"name": "swin_t", "drop_path": 0.2},
        train={"batch_size": 1024, "duration": "300 epochs", "label_smoothing": 0.1},
        optimizer={
            "name": "adamw",
            "learning_rate": 1e-3,
            "warmup": "20/3%",
            "warmup_start": 1e-3,
            "end_factor": 0.01,
            "weight_decay": 0.05,
            "clip_norm": 5.0,
        },
    )
