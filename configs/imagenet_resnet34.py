"""ResNet-34 on ImageNet: the recipe of ResNet-50 with the smaller network.

    jaxddp train imagenet_resnet34 --data.path /data/imagenet

Batch norm is `local`. The recipe has not been run at full scale.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("imagenet_resnet50").replace(model={"name": "resnet34"})
