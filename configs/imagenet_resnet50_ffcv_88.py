"""ResNet-50 on ImageNet in 88 epochs that grow from 160 to 192 pixels: FFCV's longest recipe (rn50_88_epochs.yaml).

    jaxddp train imagenet_resnet50_ffcv_88 --data.path /data/imagenet

As `imagenet_resnet50_ffcv_16`, whose docstring has the source and what differs.

Published: 78.4% top-1 (94.1% top-5). Not run here.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("imagenet_resnet50_ffcv_16").replace(
        data={"grow_start": "65 epochs", "grow_end": "76 epochs"},
        train={"duration": "88 epochs"},
    )
