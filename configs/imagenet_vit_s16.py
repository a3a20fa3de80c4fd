"""ViT-S/16 on ImageNet, 90 epochs, after Beyer et al. 2022, "Better plain ViT baselines" (arXiv:2205.01580).

    jaxddp train imagenet_vit_s16 --data.path /data/imagenet

Crops, augmentation, batch and schedule are the source's, whose warm-up is 10,000 of 112,600 steps. Its weight decay of
0.0001 is not multiplied by the learning rate; ours is, so it is 0.1. The network differs: the source takes the mean
over all tokens and fixed positions, this one a class token and learned positions, as published weights have them.
Gradients are not clipped (the source: at norm 1), and Adam's first moments are float32 (bfloat16).

Published for the source's recipe: 76.5% top-1. This one has not been run at full scale.
"""

from jaxddp.config import Config


def get_config() -> Config:
    return Config().replace(
        data={
            "crop_area": (0.05, 1.0),
            "mean": (0.5, 0.5, 0.5),
            "std": (0.5, 0.5, 0.5),
            "augment": {"rand_augment": 2, "rand_magnitude": 10.0, "mixup": 0.2},
        },
        model={"name": "vit_s16"},
        train={"batch_size": 1024},
        optimizer={"name": "adamw", "learning_rate": 1e-3, "warmup": "9%", "weight_decay": 0.1},
    )
