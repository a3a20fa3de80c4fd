"""ResNet-50 on ImageNet in 16 epochs with images that grow from 160 to 192 pixels: FFCV's recipe.

    jaxddp train imagenet_resnet50_ffcv_16 --data.path /data/imagenet

The source is github.com/libffcv/ffcv-imagenet, rn50_configs/rn50_16_epochs.yaml (Leclerc et al. 2023,
arXiv:2306.12517): BlurPool, label smoothing, a linear warmup of two epochs and a linear decay to 0, and evaluation at
256 pixels with mirrored copies. The source also applies weight decay to the head's bias and to the batch norms of
shortcuts, and normalizes the 512 images of each GPU together, as `local` does on 8 devices. Its images were resized to
at most 500 pixels, as by `jaxddp data pack`.

This recipe has not been run.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.738, "github.com/libffcv/ffcv-imagenet")


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
        optimizer={
            "learning_rate": 1.7,
            "nesterov": False,
            "schedule": "linear",
            "warmup": "2 epochs",
            "warmup_start": 1e-4,
        },
        eval={"views": "mirror"},
    )
