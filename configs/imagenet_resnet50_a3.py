"""ResNet-50 on ImageNet, 100 epochs at 160 pixels: procedure A3 of Wightman et al. 2021 (arXiv:2110.00476, table 2).

    jaxddp train imagenet_resnet50_a3 --data.path /data/imagenet

It uses binary cross-entropy, LAMB, RandAugment, mixup and CutMix, and evaluates crops of 224 out of 235 pixels (crop
ratio 0.95). LAMB clips gradients at a global norm of 1, as timm's code does. The first and the final learning rate are
the defaults of timm at that time. Unlike this recipe, the source has a threshold above which mixed labels count as 1.
Its learning rate is constant within an epoch, and its cosine begins with the warmup, so it is lower by up to 5% of the
peak.

RandAugment is timm's "rand-m6-mstd0.5-inc1", which the source uses. timm draws bilinear or bicubic interpolation for
each training crop and each warp, and fills with the mean color. Here crops are bicubic, and warps take the nearest
neighbour and fill with gray. timm mixes a whole batch with one weight; here each image has its own.

This recipe has not been run.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.781, "Wightman et al. 2021, table 2")


def get_config() -> Config:
    return load("imagenet_resnet50").replace(
        data={
            "image_size": 160,
            "eval_size": 224,
            "resize": 235,
            "interpolation": "bicubic",
            "augment": {
                "rand_augment": 2,
                "rand_operations": "timm",
                "rand_probability": 0.5,
                "rand_deviation": 0.5,
                "rand_magnitude": 6.0,
                "mixup": 0.1,
                "cutmix": 1.0,
            },
        },
        train={"batch_size": 2048, "duration": "100 epochs", "label_smoothing": 0.0},
        loss={"name": "bce"},
        optimizer={
            "name": "lamb",
            "learning_rate": 8e-3,
            "warmup": "5 epochs",
            "warmup_start": 0.0125,
            "end_factor": 1.25e-4,
            "weight_decay": 0.02,
            "clip_norm": 1.0,
        },
    )
