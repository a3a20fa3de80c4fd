"""ResNet-50 on ImageNet with a batch of 32,768, 90 epochs with LARS (You et al. 2017, arXiv:1708.03888).

    jaxddp train imagenet_resnet50_lars --data.path /data/imagenet

The learning rate, the warmup and the quadratic schedule are those of the reference implementation for TPUs
(github.com/tensorflow/tpu, models/official/resnet, lars_util.py), to which the authors of LARS contributed. On few
devices, `--train.accumulate` divides the batch. Batch norm is `ghost:64`: each group of 64 images is normalized
separately, whatever the number of devices. The source does not describe its batch norm. A kernel's gradient is divided
by |g + w d|, where d is the weight decay, and in the source by |g| + d |w|. The reference resizes images bicubically
without antialiasing; this recipe resizes as `imagenet_resnet50` does.

This recipe has not been run.
"""

from jaxddp.config import Config, Reference, load

reference = Reference(0.763, "the commit that added LARS to github.com/tensorflow/tpu")


def get_config() -> Config:
    return load("imagenet_resnet50").replace(
        model={"batch_norm": "ghost:64"},
        train={"batch_size": 32_768, "label_smoothing": 0.0},
        optimizer={
            "name": "lars",
            "learning_rate": 32.0,
            "nesterov": False,
            "schedule": "polynomial",
            # 0.0001, TensorFlow's default.
            "end_factor": 1e-4 / 32,
            "warmup": "14 epochs",
        },
    )
