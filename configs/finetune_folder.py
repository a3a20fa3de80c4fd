"""A folder of pictures on a ResNet-50 that begins with published weights, 10 epochs.

    jaxddp train finetune_folder --data.path PICTURES --model.weights resnet50.safetensors

PICTURES has a folder a class, below train/ and val/, or without them and with `--data.val-share 0.1`. The weights are
torchvision's or timm's of a ResNet-50, or a run's work directory; `--model.name` names another network. The head is new
and learns ten times as fast as the rest; that of a ViT or a ConvNeXt is called "head", and so `--model.new-layers head
--optimizer.rate-factors head=10`. A linear probe is `--model.freeze "all but fc"`.

Batch norm is `local`, 32 images together on one device; `--model.freeze "all but layer4,fc"` and its like keep the
statistics of what they freeze. No source is followed in this, and it has not been run at full scale.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("imagenet_resnet50").replace(
        data={"crop_area": (0.25, 1.0)},
        model={"new_layers": "fc"},
        train={"batch_size": 32, "duration": "10 epochs"},
        optimizer={"learning_rate": 0.005, "warmup": "10%", "rate_factors": ("fc=10",)},
        eval={"batch_size": 32},
    )
