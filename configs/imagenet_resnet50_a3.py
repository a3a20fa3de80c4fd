"""ResNet-50 on ImageNet, 100 epochs at 160 pixels: procedure A3 of Wightman et al. 2021 (arXiv:2110.00476, table 2).

    jaxddp train imagenet_resnet50_a3 --data.path /data/imagenet

Binary cross entropy, LAMB, RandAugment, mixup and cutmix; evaluated at 224 pixels out of 236 (crop ratio 0.95). What
the source has and this recipe has not: noise in RandAugment's magnitudes, crops resized by a bicubic filter, and mixed
labels that count as whole ones from a threshold on.

Published for the source's recipe: 78.1% top-1. Not run here.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("imagenet_resnet50").replace(
        data={
            "image_size": 160,
            "eval_size": 224,
            "resize": 236,
            "augment": {"rand_augment": 2, "rand_magnitude": 6.0, "mixup": 0.1, "cutmix": 1.0},
        },
        train={"batch_size": 2048, "duration": "100 epochs", "label_smoothing": 0.0},
        loss={"name": "bce"},
        optimizer={"name": "lamb", "learning_rate": 8e-3, "warmup": "5 epochs", "weight_decay": 0.02},
    )
