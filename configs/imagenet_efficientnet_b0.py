"""EfficientNet-B0 on ImageNet, 350 epochs, the recipe of Tan and Le 2019 (arXiv:1905.11946, section 5.2).

    jaxddp train imagenet_efficientnet_b0 --data.path /data/imagenet

RMSProp's settings, the warmup of 5 epochs, the learning rate of 0.016 for 256 images, which is multiplied by 0.97 every
2.4 epochs, and the averaged weights are those of the paper's code (github.com/tensorflow/tpu,
models/official/efficientnet). Unlike this recipe, the source's RMSProp adds epsilon, 0.001, below the root, starts from
a mean square of 1, and has the learning rate within the momentum. It decays biases too, averages the statistics of
batch norm with the weights, and its batch norms have a momentum of 0.99 and an epsilon of 0.001.

Images are resized bicubically and augmented with AutoAugment, as in the source. Its code resizes without antialiasing,
and has another table of AutoAugment ("v0"), with translations of up to 250 pixels; this recipe has the paper's table.

This recipe has not been run at full scale.
"""

from jaxddp.config import Config, Reference

reference = Reference(0.771, "Tan and Le 2019")


def get_config() -> Config:
    return Config().replace(
        data={"interpolation": "bicubic", "augment": {"policy": "auto_augment_imagenet"}},
        model={"name": "efficientnet_b0", "drop_path": 0.2, "dropout": 0.2},
        train={"batch_size": 4096, "duration": "350 epochs", "label_smoothing": 0.1, "ema": 0.9999},
        optimizer={
            "name": "rmsprop",
            "learning_rate": 0.256,
            # 5 of 350 epochs.
            "warmup": "10/7%",
            "schedule": "step",
            "step_at": tuple(2.4 * number / 350 for number in range(1, 146)),
            "step_factor": 0.97,
            "weight_decay": 1e-5,
            "momentum": 0.9,
            "beta2": 0.9,
            "epsilon": 0.0316,
        },
    )
