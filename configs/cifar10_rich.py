"""CIFAR-10 as `cifar10`, with images that grow, a straight fall of the rate, label smoothing and averaged parameters.

    jaxddp train cifar10_rich --data.path DIR

The network is the same. Small images make the first epochs cheap (Howard 2018, fast.ai's progressive resizing; FFCV),
so that in the time of 3 epochs of `cifar10` there are 5. No source is followed in the numbers.
Measured here beside `cifar10` in equal time: see BUILD_NOTES.md.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("cifar10").replace(
        data={"grow_from": 20, "grow_start": "20%", "grow_by": 4},
        train={"label_smoothing": 0.1, "ema": 0.99},
        optimizer={"schedule": "linear", "warmup": "25%"},
        eval={"views": "mirror"},
        checkpoint={"best": "val_ema top1"},
    )
