"""RegNetY-400MF on ImageNet, 100 epochs, the recipe of Radosavovic et al. 2020 (arXiv:2003.13678, section 5).

    jaxddp train imagenet_regnet_y_400mf --data.path /data/imagenet

The learning rate of 0.8 for 1,024 images, the weight decay of 5e-5 and the warmup of 5 epochs are those of the paper's
code (github.com/facebookresearch/pycls). Batch norms use 128 images, as on eight GPUs. Unlike this recipe, the source
decays batch norm and biases too, its learning rate is constant within an epoch, and its cosine begins with the warmup,
so it is lower by up to 5% of the peak. It also adds random multiples of the principal components of ImageNet's colors
(deviation 0.1).

This recipe has not been run at full scale.
"""

from jaxddp.config import Config, Reference

reference = Reference(0.741, "Radosavovic et al. 2020")


def get_config() -> Config:
    return Config().replace(
        model={"name": "regnet_y_400mf"},
        train={"batch_size": 1024, "duration": "100 epochs"},
        optimizer={"name": "momentum", "learning_rate": 0.8, "warmup": "5%", "warmup_start": 0.1, "weight_decay": 5e-5},
    )
