"""ResNet-50 on ImageNet in 88 epochs with images from 160 to 192 pixels: FFCV's longest recipe (rn50_88_epochs.yaml).

    jaxddp train imagenet_resnet50_ffcv_88 --data.path /data/imagenet

See `imagenet_resnet50_ffcv_16` for the source and the differences.

This recipe has not been run.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.784, "github.com/libffcv/ffcv-imagenet")


def get_config() -> Config:
    return load("imagenet_resnet50_ffcv_16").replace(
        # 192 pixels from epoch 71, as in the source, which computes the size of whole epochs from 65 to 76.
        data={"grow_start": "66 epochs", "grow_end": "76 epochs"},
        train={"duration": "88 epochs"},
    )
