"""ViT-S/16 on ImageNet, 90 epochs, after Beyer et al. 2022, "Better plain ViT baselines" (arXiv:2205.01580).

    jaxddp train imagenet_vit_s16 --data.path /data/imagenet

Crops, flips, batch, schedule and clipping are those of the source, whose warmup takes 10,000 of 112,600 steps.
RandAugment has two layers of magnitude 10 in both. That of the source (github.com/google-research/big_vision,
pp/autoaugment.py) chooses among 16 operations: invert, solarize_add and a gray square of 80 pixels replace the
identity, translations are of 100 pixels, color, contrast, brightness and sharpness only increase (factor 1.9), and
solarize has no effect. Its mixup has one weight for a batch; here each image has its own.

The source's weight decay of 0.0001 is not multiplied by the learning rate. Here the weight decay is multiplied by the
learning rate of 0.001, so it is 0.1. The source averages all tokens and has fixed position embeddings. This network has
a class token and learned position embeddings, like published weights. Unlike this recipe, the source's code
(configs/vit_s16_i1k.py) keeps Adam's first moments in bfloat16, has a hidden layer before the head, and trains on 99%
of the images.

This recipe has not been run at full scale.
"""

from jaxddp.config import Config, Reference

reference = Reference(0.765, "Beyer et al. 2022")


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
        optimizer={"name": "adamw", "learning_rate": 1e-3, "warmup": "8.88%", "weight_decay": 0.1, "clip_norm": 1.0},
    )
