"""ResNet-18 with the small stem on Fashion-MNIST (IDX files as published, 28x28 gray), 10 epochs.

    jaxddp train fashion_mnist --data.path DIR

Network, batch, rate and length are those of "Dive into Deep Learning" (d2l.djl.ai), "Concise Implementation for
Multiple GPUs"; the rest is cifar10's. The source normalizes the 256 images of a GPU together, as `local` does on one
device. It has not been run at full scale. DIR may hold the names of the classes in classes.txt.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("cifar10").replace(
        data={"image_size": 28, "resize": 28, "augment": {"pad": 2}, "mean": (0.2860,) * 3, "std": (0.3530,) * 3},
        train={"duration": "10 epochs"},
        optimizer={"learning_rate": 0.1},
    )
