"""ResNet-50 v1.5 on ImageNet, 90 epochs, after Goyal et al. 2017 (arXiv:1706.02677).

    jaxddp train imagenet_resnet50 --data.path /data/imagenet

Unlike the source, it has a cosine schedule and label smoothing of 0.1.

The source normalizes the 32 images of each GPU together. `local` does this on 8 devices, and `--model.batch-norm
ghost:32` on any number of devices. Compiled for a GPU, `ghost:32` moves 2.6% more bytes. Its speed was not measured.

No accuracy of this recipe is published. It has been run for single steps only.
"""

from jaxddp.config import Config


def get_config() -> Config:
    return Config().replace(
        data={"image_size": 224, "crop": "random_area", "crop_area": (0.08, 1.0), "resize": 256},
        model={"name": "resnet50"},
        train={"batch_size": 256, "duration": "90 epochs", "label_smoothing": 0.1},
        optimizer={
            "name": "momentum",
            "learning_rate": 0.1,
            "schedule": "cosine",
            "warmup": "5%",
            "weight_decay": 1e-4,
        },
    )
