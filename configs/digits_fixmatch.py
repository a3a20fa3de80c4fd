"""FixMatch on the digits with 4 labels per class: 40 labelled images, and all 1,497 images without labels.

    jaxddp data sample digits --out data/digits && jaxddp train digits_fixmatch --data.path data/digits

Top-1 on the 300 held-out images, for three draws of the 40 labels (`--data.labels-seed 0`, 1, 2):

    FixMatch                                             92.0%, 96.0%, 91.7%: mean 93.2%
    the labelled images alone, for the same steps        87.3%, 78.3%, 83.7%: mean 83.1%

The second line was measured with `--objective.name supervised`. A run took 67 to 81 s of CPU time, and 14 to 27 s
without the unlabelled images (benchmarks/RESULTS.md). The strength of augmentation and the learning rate were chosen on
two other draws. The accuracies are those of the averaged parameters (`val_ema`). Images are not flipped.
"""

from jaxddp.config import Config, load


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
        train={"duration": "600 steps", "ema": 0.99},
        objective={"name": "fixmatch", "strong_rand_magnitude": 5.0, "strong_cutout": 0.25},
        optimizer={"learning_rate": 0.003},
        eval={"every": "200 steps"},
        checkpoint={"every": "200 steps", "best": "val_ema top1"},
        log={"every": "50 steps"},
    )
