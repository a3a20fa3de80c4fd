"""Fine-tuning of a ResNet-50 with published weights on a folder of images, 10 epochs.

    jaxddp train finetune_folder --data.path PICTURES --model.weights timm/resnet50.a1_in1k

PICTURES has one folder per class in train/ and val/, or directly, with `--data.val-share 0.1`. `jaxddp weights` lists
the names of weights; they select the network and the size of the images. A file or a run can be given too. The head is
new and has ten times the learning rate of the other layers. For a linear probe, use `--model.freeze "all but the
head"`.

Batch norm is `local`: one device normalizes 32 images together. With `--model.freeze "all but layer4,the head"`, frozen
layers keep their statistics. The recipe has no source, and it has not been run at full scale.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("imagenet_resnet50").replace(
        data={"crop_area": (0.25, 1.0)},
        model={"new_layers": "the head"},
        train={"batch_size": 32, "duration": "10 epochs"},
        optimizer={"learning_rate": 0.005, "warmup": "10%", "rate_factors": ("the head=10",)},
        eval={"batch_size": 32},
    )
