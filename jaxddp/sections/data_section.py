"""The part of a config that says what is trained on: examples, and how an image becomes a square of pixels."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.ranges import Count, HeldOut, Range, Seed, Share
from jaxddp.overrides import check_values, names_of

Pixels = Annotated[int, Range(1, 10_000)]
Padding = Annotated[int, Range(0, 10_000)]
RandAugment = Annotated[int, Range(0, 100)]
RandMagnitude = Annotated[float, Range(0, 10)]
Strength = Annotated[float, Range(0, 1000)]
Spread = Annotated[float, Range(1e-6, 1)]
IMAGE_KEYS = ("image_size", "channels", "bits", "mean", "std")
"""The keys of `data` that decide what a network is taught to see."""


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to training images on the device, a function of (seed, epoch, row).

    Raises:
        InputError: a value of another type than its field's, or out of its range.
    """

    flip: bool = True
    """Mirror half of the images, left to right."""
    alternate_flip: bool = False
    """Instead of `flip`: mirror half of the images in the first epoch, and then each one in every other epoch."""
    pad: Padding = 0
    """Pad by this many pixels, then crop the image's size at random."""
    border: Literal["black", "reflect"] = "black"
    """What `pad` adds: black pixels, or the image mirrored at its edge."""
    rand_augment: RandAugment = 0
    """Layers of RandAugment, each one of 14 operations; 0 none."""
    rand_magnitude: RandMagnitude = 9.0
    """How strong RandAugment's operations are, 0 to 10."""
    cutout: Padding = 0
    """Side in pixels of a black square at a random place; 0 none."""
    erase: Share = 0.0
    """Probability that a random rectangle is replaced by the mean colour."""
    mixup: Strength = 0.0
    """Blend an image and its neighbour: the alpha of the Beta distribution that weighs them; 0 none."""
    cutmix: Strength = 0.0
    """Put a box of an image into its neighbour: the alpha of the Beta distribution of its share; 0 none. With mixup
    too, half of the pairs each."""
    then: tuple[str, ...] = ()
    """Further augmentations by name, in this order, after those above and before images are mixed."""

    def __post_init__(self) -> None:
        check_values(self, "data.augment.")
        object.__setattr__(self, "then", names_of(self.then))


@dataclass(frozen=True)
class DataConfig:
    """Which examples, and how an image becomes a square of pixels.

    Raises:
        InputError: a value of another type than its field's, or out of its range.
    """

    path: str | None = None
    """Where the data lie: a folder with solution files, a CSV file, Parquet, packed records, a folder a class, IDX,
    CIFAR or NumPy files; a URL (s3://, gs://, https://) of solution files; or tfds:NAME. Or give `name`."""
    name: str | None = None
    """Name of a data set in datasets.toml (the file JAXDDP_DATASETS names, or the one in the working directory)."""
    image_size: Pixels = 224
    """Side of the square that the network is given, in pixels."""
    resize: Pixels = 256
    """Evaluation: the short side is resized to this, and the center image_size (or eval_size) square is taken."""
    crop: Literal["random_area", "whole"] = "random_area"
    """Training crops: a random area resized to image_size, or the whole image (small images; see `augment.pad`)."""
    crop_area: tuple[Share, Share] = (0.08, 1.0)
    """Smallest and largest share of the image that a random-area crop covers."""
    mean: tuple[Share, ...] = (0.485, 0.456, 0.406)
    """Of each channel, or one for all, of values from 0 to 1."""
    std: tuple[Spread, ...] = (0.229, 0.224, 0.225)
    """Of each channel, or one for all: an image becomes (image - mean) / std."""
    eval_size: Pixels | None = None
    """The side of evaluation's images, and of those that are predicted; image_size where absent."""
    cache: Literal["none", "device"] = "none"
    """Read training images batch by batch, or decode all of them once and keep their pixels on each device."""
    val_share: HeldOut | None = None
    """Where there is no validation split: validate on this share of each class, chosen by a hash of the names."""
    classes: str | None = None
    """A range of the synset mapping ("0:200") or synset names ("n01440764,n01443537"); all where absent."""
    limit: Count | None = None
    """Train on this many examples only."""
    sampling: Literal["shuffled", "balanced"] = "shuffled"
    """Every example once an epoch, or, balanced, all classes equally often: an epoch is as long, a class with fewer
    images than others repeats them, and one with more leaves some for later epochs."""
    train: str | None = None
    """Solution file of the training split; where absent, that of datasets.toml, else LOC_train_solution.csv."""
    val: str | None = None
    """Solution file of the validation split; where absent, that of datasets.toml, else LOC_val_solution.csv."""
    data_dir: str | None = None
    """Where tensorflow-datasets keeps its prepared sets; its own default where absent."""
    local_cache: str | None = None
    """Folder that keeps what was fetched from a URL, for later epochs and runs."""
    channels: Literal[1, 3, 4] = 3
    """What files are decoded to: 1 gray, 3 RGB, 4 RGBA. Arrays keep theirs."""
    bits: Literal[8, 16] = 8
    """Of a decoded value. Of files with 16, 8 keep the upper half, which is said once. Arrays keep theirs."""
    verify: Literal["first", "manifest", "never"] = "first"
    """Read each file to its last pixel the first time, unless an earlier run or `data check` did; beside that, hold it
    against the SHA-256 in `manifest` each time; or do neither."""
    manifest: str | None = None
    """What `jaxddp data check` wrote of the data; where absent, its default name in the working directory, or beside
    the data."""
    bad_images: Literal["fail", "substitute"] = "fail"
    """A training image that cannot be used ends the run, or is substituted by another of its class, and counted."""
    max_bad_images: Share = 0.001
    """The share of an epoch's images that may be substituted, rounded to the nearest number, but at least one."""
    labels_per_class: Count | None = None
    """Use the labels of this many examples of each class only: they are the training set."""
    labels_seed: Seed = 0
    """Which examples these are."""
    unlabelled: str | None = None
    """Images for objectives that take some without labels: "train", all training images, or where they lie: a folder of
    images, or what `path` takes. Their labels are not looked at."""
    grow_from: Pixels | None = None
    """Training begins with images of this side, which grows to image_size; all have image_size where absent."""
    grow_start: Duration = field(default_factory=lambda: Duration.parse("0 steps"))
    """From where in the run on the side grows, linearly with the step."""
    grow_end: Duration = field(default_factory=lambda: Duration.parse("80%"))
    """Where in the run it has grown to image_size."""
    grow_by: Pixels = 32
    """Between grow_from and image_size, the side is the nearest multiple of this; each side is compiled by itself."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    @property
    def area(self) -> tuple[float, float]:
        """What `crop_area` says. Raises: InputError; the smallest share is 0, or above the largest."""
        least, most = self.crop_area
        if not 0 < least <= most <= 1:
            raise InputError(
                Key("data.crop_area", self.crop_area),
                ": give the smallest share of the image, above 0, and then the largest, at most 1",
            )
        return least, most

    def __post_init__(self) -> None:
        check_values(self, "data.")

    @property
    def of_evaluation(self) -> "DataConfig":
        """As evaluation's images are made: with their own size in the place of training's."""
        return self if self.eval_size is None else replace(self, image_size=self.eval_size)
