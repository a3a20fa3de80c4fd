"""ResNet-18 with the small stem on Fashion-MNIST (IDX files as published, 28x28 gray), 10 epochs of plain SGD.

    jaxddp data get fashion_mnist --out DIR && jaxddp train fashion_mnist --data.path DIR

The recipe is that of "Dive into Deep Learning", "Concise Implementation for Multiple GPUs" (d2l.djl.ai): weights from a
normal distribution with standard deviation 0.01, 1x1 shortcuts without batch norm, pixels from 0 to 1, no augmentation,
and a constant learning rate of 0.1 for a batch of 256. The source's other convolutions have biases, which have no
effect before batch norm. The source normalizes the 256 images of a GPU together, as `local` does on one device.

The chapter reports a test accuracy of 0.91 on one GPU (batch 256, rate 0.1) and 0.87 on two (batch 512, rate 0.2). On
4,699 images of the set, this config reached 81.4% top-1, and 65.0% with batch 512 and rate 0.2 (means of two seeds).
The accuracy varies strongly between epochs (benchmarks/RESULTS.md): the learning rate does not decay. MNIST (`data get
mnist`) has images of the same size.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.91, "Dive into Deep Learning, on one GPU")


def get_config() -> Config:
    return load("cifar10").replace(
        data={"image_size": 28, "resize": 28, "mean": (0.0,), "std": (1.0,), "augment": {"flip": False, "pad": 0}},
        model={"weight_init": "normal", "shortcut_norm": False, "zero_init_last_scale": False},
        train={"duration": "10 epochs"},
        optimizer={
            "learning_rate": 0.1,
            "schedule": "constant",
            "warmup": "0 steps",
            "momentum": 0.0,
            "nesterov": False,
            "weight_decay": 0.0,
        },
    )
