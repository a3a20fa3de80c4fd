"""ResNet-50 on ImageNet with a batch of 8,192, 90 epochs: all settings of Goyal et al. 2017 (arXiv:1706.02677).

    jaxddp train imagenet_resnet50_goyal --data.path /data/imagenet

The learning rate of 0.1 is for a batch of 256 and scales with the batch: `--train.batch-size 1024` trains with 0.4.
Every 32 images are normalized together, as on each GPU of the source, on any number of devices. The warmup begins at
0.1. `imagenet_resnet50` is a variant with a batch of 256, a cosine schedule and label
smoothing.

This recipe has been run for single steps only.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.7626, "Goyal et al. 2017, table 1", runs=5, deviation=0.0009)


def get_config() -> Config:
    return load("imagenet_resnet50").replace(
        model={"batch_norm": "ghost:32"},
        train={"batch_size": 8192, "label_smoothing": 0.0},
        optimizer={
            "reference_batch": 256,
            "schedule": "step",
            "warmup": "5 epochs",
            "warmup_start": 256 / 8192,
        },
    )
