"""ResNet-18 on ImageNet in 16 epochs on one GPU: FFCV's recipe (rn18_configs/rn18_16_epochs.yaml).

    jaxddp train imagenet_resnet18_ffcv_16 --data.path /data/imagenet

As `imagenet_resnet50_ffcv_16`, whose docstring has the source and what differs, with a batch of 1,024 that is
normalized together, as `local` does on one device.

Published: 66.9% top-1 (86.8% top-5). Not run here.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("imagenet_resnet50_ffcv_16").replace(
        model={"name": "resnet18"},
        train={"batch_size": 1024},
        optimizer={"learning_rate": 0.5, "weight_decay": 5e-5},
    )
