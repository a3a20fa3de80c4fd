"""MobileNetV3-Large on ImageNet, 600 epochs: torchvision's recipe.

    jaxddp train imagenet_mobilenet_v3_large --data.path /data/imagenet

The source is github.com/pytorch/vision, references/classification, README.md and train.py. The learning rate has no
warmup and is multiplied by 0.973 every 2 epochs. Unlike this recipe, the source decays batch norm and biases too, and
averages the parameters of its last three checkpoints that improved.

AutoAugment and random erasing are those of the source. Its warps interpolate bilinearly and fill with black; here they
take the nearest neighbour and fill with gray. Its training crops are resized with antialiasing.

This recipe has not been run at full scale.
"""

from jaxddp.config import Config, Reference

reference = Reference(0.74, "torchvision, references/classification")


def get_config() -> Config:
    return Config().replace(
        data={"augment": {"policy": "auto_augment_imagenet", "erase": 0.2, "erase_area": (0.02, 0.33)}},
        model={"name": "mobilenet_v3_large", "dropout": 0.2},
        train={"batch_size": 1024, "duration": "600 epochs"},
        optimizer={
            "name": "rmsprop",
            "learning_rate": 0.064,
            "warmup": "0%",
            "schedule": "step",
            "step_at": tuple(number / 300 for number in range(1, 300)),
            "step_factor": 0.973,
            "weight_decay": 1e-5,
            "momentum": 0.9,
            "beta2": 0.9,
            "epsilon": 0.0316,
        },
    )
