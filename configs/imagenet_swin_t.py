"""Swin-T on ImageNet, 300 epochs, the recipe of Liu et al. 2021 (arXiv:2103.14030).

    jaxddp train imagenet_swin_t --data.path /data/imagenet

The warmup takes 20 epochs. The norm at which gradients are clipped is that of the source's code
(github.com/microsoft/Swin-Transformer), like the final learning rate of 1e-5. Unlike this recipe, the source has noise
in RandAugment's magnitudes and bicubic resizing of crops. Its cosine begins before the warmup, so it goes on from 0.989
of the peak.

The source published 81.3% top-1. This recipe has not been run at full scale.
"""

from jaxddp.config import Config


def get_config() -> Config:
    return Config().replace(
        data={"augment": {"rand_augment": 2, "erase": 0.25, "mixup": 0.8, "cutmix": 1.0}},
        model={"name": "swin_t", "drop_path": 0.2},
        train={"batch_size": 1024, "duration": "300 epochs", "label_smoothing": 0.1},
        optimizer={
            "name": "adamw",
            "learning_rate": 1e-3,
            "warmup": "6.67%",
            "end_factor": 0.01,
            "weight_decay": 0.05,
            "clip_norm": 5.0,
        },
    )
