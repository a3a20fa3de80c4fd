"""FixMatch on the digits with 4 labels a class: 40 labelled images, and all 1,497 without their labels.

PLACEHOLDER
"""

from jaxddp.config import Config, load
from jaxddp.engine.parts.average import ParameterAverage
from jaxddp.engine.parts.part import Part
from jaxddp.schedules.warmup import Steps


def get_config() -> Config:
    return load("digits").replace(
        data={
            "image_size": 16,
            "resize": 16,
            "channels": 1,
            "labels_per_class": 4,
            "unlabelled": "train",
            "cache": "device",
        },
        model={"name": "resnet10"},
        train={"batch_size": 32, "duration": "600 steps"},
        objective={"name": "fixmatch", "strong_rand_magnitude": 5.0, "strong_cutout": 0.25},
        optimizer={"learning_rate": 0.003},
        eval={"every": "200 steps"},
        checkpoint={"every": "200 steps"},
        log={"every": "50 steps"},
    )


def get_parts(config: Config, steps: Steps) -> list[Part]:
    return [ParameterAverage(0.99)]
