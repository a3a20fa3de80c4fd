"""ResNet-18 with the small stem on CIFAR-10, 30 epochs.

    jaxddp data get cifar10 --out DIR && jaxddp train cifar10 --data.path DIR

Batch norm is `local`: one device normalizes 256 images together. The recipe has no source. At width 16 and with 10
epochs it reached 81.8% top-1 on JPEG files of CIFAR-10 (benchmarks/RESULTS.md). At width 64 it has not been run.
"""

from jaxddp.config import Config


def get_config() -> Config:
    return Config().replace(
        data={
            "image_size": 32,
            "crop": "whole",
            "resize": 32,
            "mean": (0.4914, 0.4822, 0.4465),
            "std": (0.2470, 0.2435, 0.2616),
            "augment": {"pad": 4},
        },
        model={"name": "resnet18", "stem": "small"},
        train={"batch_size": 256, "duration": "30 epochs"},
        optimizer={"learning_rate": 0.2, "warmup": "10%", "weight_decay": 5e-4},
        eval={"batch_size": 512},
    )
