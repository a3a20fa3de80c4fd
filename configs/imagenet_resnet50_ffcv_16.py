"""ResNet-50 on ImageNet in 16 epochs that grow from 160 to 192 pixels: FFCV's recipe.

    jaxddp train imagenet_resnet50_ffcv_16 --data.path /data/imagenet

From github.com/libffcv/ffcv-imagenet, rn50_configs/rn50_16_epochs.yaml (Leclerc et al. 2023, arXiv:2306.12517):
BlurPool, label smoothing, a rate that rises over two epochs and falls in a straight line to 0; evaluated at 256 pixels
and mirrored. The source decays the head's bias too, and normalizes the 512 images of a GPU together, as `local` does on
8 devices. Its images were resized to 500 pixels at most (`jaxddp data pack` does so).

Published: 73.8% top-1 (90.8% top-5). Not run here.
"""

from jaxddp.config import Config, load


def get_config() -> Config:
    return load("imagenet_resnet50").replace(
        data={
            "image_size": 192,
            "grow_from": 160,
            "grow_start": "11 epochs",
            "grow_end": "13 epochs",
            "eval_size": 256,
            # 256 pixels out of 256 / 0.875.
            "resize": 293,
        },
        model={"blur_pool": True, "zero_init_last_scale": False},
        train={"batch_size": 4096, "duration": "16 epochs"},
        optimizer={"learning_rate": 1.7, "nesterov": False, "schedule": "linear", "warmup": "2 epochs"},
        eval={"views": "mirror"},
    )
