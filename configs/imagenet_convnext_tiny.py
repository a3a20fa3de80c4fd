"""ConvNeXt-T on ImageNet, 300 epochs, the recipe of Liu et al. 2022 (arXiv:2201.03545, appendix A.1).

    jaxddp train imagenet_convnext_tiny --data.path /data/imagenet

The warmup takes 20 epochs. On few devices, `--train.accumulate` divides the batch of 4,096. The final learning rate of
1e-6 and the averaged weights are those of the source's code (github.com/facebookresearch/ConvNeXt).

The operations, probabilities and areas of the augmentation are those of timm's "rand-m9-mstd0.5-inc1" and erasing mode
"pixel", which the source uses. timm's warps interpolate bicubically and fill with the mean color; here they take the
nearest neighbour and fill with gray. timm mixes a whole batch with one weight; here each image has its own.

This recipe has not been run at full scale.
"""

from jaxddp.config import Config, Reference

reference = Reference(0.821, "Liu et al. 2022")


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
        model={"name": "convnext_tiny", "drop_path": 0.1},
        train={
            "batch_size": 4096,
            "duration": "300 epochs",
            "label_smoothing": 0.1,
            "ema": 0.9999,
            "ema_warmup": False,
        },
        optimizer={
            "name": "adamw",
            "learning_rate": 4e-3,
            "warmup": "20/3%",
            "end_factor": 2.5e-4,
            "weight_decay": 0.05,
        },
    )
