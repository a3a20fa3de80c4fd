"""A recipe that starts soon: the digits' config at 16 pixels, with a network that compiles in a second."""

from small import SmallNet

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("digits").replace(
        data={"image_size": 16, "resize": 16, "augment": {"pad": 1}},
        train={"batch_size": 8},
        eval={"batch_size": 8},
        log={"every": "1 step", "to": ("jsonl", "curves", "parameters")},
    )


def get_model(config: Config, num_classes: int) -> SmallNet:
    return SmallNet(batch_norm=True, sync="data", classes=num_classes)
