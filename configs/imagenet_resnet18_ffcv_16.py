"""ResNet-18 on ImageNet in 16 epochs on one GPU: FFCV's recipe (rn18_configs/rn18_16_epochs.yaml).

    jaxddp train imagenet_resnet18_ffcv_16 --data.path /data/imagenet

See `imagenet_resnet50_ffcv_16` for the source and the differences. The batch of 1,024 is normalized together, as
`local` does on one device.

This recipe has not been run.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.669, "github.com/libffcv/ffcv-imagenet")


def get_config() -> Config:
    return load("imagenet_resnet50_ffcv_16").replace(
        model={"name": "resnet18"},
        train={"batch_size": 1024},
        optimizer={"learning_rate": 0.5, "weight_decay": 5e-5},
    )
