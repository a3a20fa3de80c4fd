"""The `data` section of a config: the examples of a run, and their preprocessing."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Literal

from jaxddp.config.registry import Requires
from jaxddp.config.values import Names, check_values
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, Key
from jaxddp.core.ranges import Count, HeldOut, Range, Seed, Share

Pixels = Annotated[int, Range(1, 10_000)]
Padding = Annotated[int, Range(0, 10_000)]
RandAugment = Annotated[int, Range(0, 100)]
RandMagnitude = Annotated[float, Range(0, 10)]
Strength = Annotated[float, Range(0, 1000)]
Spread = Annotated[float, Range(1e-6, 1)]
UNLABELLED_RATIO = 7
"""The default number of unlabelled images for each labelled one, for all objectives that read unlabelled images."""
PROCESS = "{process}"
TABLE_KEYS = ("columns", "images", "suffix", "targets", "weight_column", "label_separator", "split_column", "val_fold")
TABLE_KEYS += ("group_column",)
"""The keys of `data` that say how a table of images is read."""
IMAGE_KEYS = ("image_size", "channels", "bits", "mean", "std")
"""The keys of `data` that determine the input of a network."""
RESIZING_KEYS = ("eval_size", "resize", "eval_crop", "interpolation")
"""The keys of `data` that determine how images are resized to this input. An evaluation may change them."""


@dataclass(frozen=True)
class AugmentConfig:
    """Augmentation of training images on the device, as a function of (seed, epoch, row)."""

    flip: bool = True
    """Flip half of the images from left to right."""
    alternate_flip: bool = False
    """With `flip` off: half of the images are flipped in epochs 1, 3, 5, …, the other half in epochs 2, 4, 6, …"""
    pad: Padding = 0
    """Pad each side by this many pixels, then take a random crop of the original size."""
    border: Annotated[Literal["black", "reflect"], Requires("data.augment.pad")] = "black"
    """Pixels that `pad` adds: black pixels, or a reflection of the image at its edges."""
    rand_augment: RandAugment = 0
    """Number of RandAugment layers, each of which applies one operation; 0 for none."""
    rand_magnitude: Annotated[RandMagnitude, Requires("data.augment.rand_augment")] = 9.0
    """Strength of the RandAugment operations, from 0 to 10."""
    rand_deviation: Annotated[RandMagnitude, Requires("data.augment.rand_augment")] = 0.0
    """Standard deviation of the strength of each operation; 0 for a fixed strength."""
    rand_probability: Annotated[Share, Requires("data.augment.rand_augment")] = 1.0
    """Probability with which each RandAugment layer applies its operation."""
    rand_operations: Annotated[Literal["paper", "timm"], Requires("data.augment.rand_augment")] = "paper"
    """Operations of RandAugment and their ranges: the 14 of the paper, or the 15 of timm's "rand-m9-inc1"."""
    policy: str | None = None
    """Name of a policy, which draws operations for each image: TrivialAugment, AutoAugment, AugMix or 3-Augment. If
    None, no policy is used. RandAugment has the key `rand_augment` instead."""
    color_jitter: tuple[Share, Share, Share, Share] | None = None
    """Strengths of random changes of brightness, contrast, saturation (0 to 1 each) and hue (0 to 0.5), as in
    torchvision. If None, colors are not changed."""
    cutout: Padding = 0
    """Side of a black square at a random position, in pixels; 0 for none."""
    erase: Share = 0.0
    """Probability that a random rectangle is filled."""
    erase_area: Annotated[tuple[Share, Share], Requires("data.augment.erase")] = (0.02, 0.4)
    """Smallest and largest fraction of the image's area that `erase` fills."""
    erase_fill: Annotated[Literal["mean", "noise"], Requires("data.augment.erase")] = "mean"
    """Pixels that `erase` writes: the mean color, or normal noise in each pixel."""
    mixup: Strength = 0.0
    """Alpha of the Beta distribution of the weight with which mixup blends each image with another one; 0 for none."""
    cutmix: Strength = 0.0
    """Alpha of the Beta distribution of the area of the box that cutmix pastes from one image into another; 0 for none.
    If `mixup` is also set, each of them is applied to half of the pairs."""
    then: Names = ()
    """Names of further augmentations of pixels. They run in this order, after `cutout` and before `erase`."""

    def __post_init__(self) -> None:
        check_values(self, "data.augment.")
        _check_area("data.augment.erase_area", self.erase_area)


def _check_area(key: str, shares: tuple[float, float]) -> None:
    if not 0 < shares[0] <= shares[1]:
        expected = ": give the smallest share of the image, above 0, and then the largest, at most 1"
        raise InputError(Key(key, shares), expected)


@dataclass(frozen=True)
class DataConfig:
    """The examples of a run, and their preprocessing."""

    path: str | None = None
    """Path of the data: a folder with ImageNet's solution files, a CSV file, Parquet files, .tar files of WebDataset,
    packed records, a folder with one folder per class, or IDX, CIFAR or NumPy files. Also a URL (s3://, gs://,
    https://) of solution files, Parquet or .tar files, a pattern of files ("shards-{000..146}.tar"), hf:OWNER/NAME or
    tfds:NAME. Alternatively, set `name`."""
    name: str | None = None
    """Name of a data set in the file that JAXDDP_DATASETS names, or in datasets.toml in the working directory."""
    placement: Literal["shared", "local"] = "shared"
    """"shared" needs the same data on every process; "local" trains on the union of the data of all processes, each of
    which reads its own, with its number in place of {process} in `path`, `train`, `val`, `data_dir`, `manifest`."""
    image_size: Pixels = 224
    """Side of the square input of the network, in pixels."""
    resize: Pixels = 256
    """In evaluation, the short side is resized to this many pixels before the central square is cropped."""
    eval_crop: Literal["center", "squash"] = "center"
    """In evaluation, "center" resizes the short side and keeps the aspect; "squash" resizes both sides to `resize`, so
    the central square shows the whole width and height."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    """Interpolation of images that are resized, in training and evaluation."""
    crop: Literal["random_area", "whole"] = "random_area"
    """Training crops: a random area resized to `image_size`, or the whole image, if it is small (see `augment.pad`)."""
    crop_area: Annotated[tuple[Share, Share], Requires("data.crop", ("random_area",))] = (0.08, 1.0)
    """Smallest and largest fraction of the image's area that a random crop covers."""
    mean: tuple[Share, ...] = (0.485, 0.456, 0.406)
    """Mean of each channel, or one mean for all, for pixel values between 0 and 1."""
    std: tuple[Spread, ...] = (0.229, 0.224, 0.225)
    """Standard deviation of each channel, or one for all: the input is (image - mean) / std."""
    eval_size: Pixels | None = None
    """Side of the images in evaluation and prediction, in pixels. If None, `image_size`."""
    cache: Literal["none", "device"] = "none"
    """"none" reads training images batch by batch; "device" decodes all once and keeps them in each device's memory."""
    val_share: HeldOut | None = None
    """If the data have no validation split: the fraction of each class that is held out for validation. A hash of the
    file names chooses the images."""
    fold: str | None = None
    """In place of `val_share`, the fold that is held out for validation, such as 0/5: the first of five folds. A class
    is spread over the folds, and a group is in one fold."""
    classes: str | None = None
    """Classes to use: a range ("0:200") or a list of class ids ("n01440764,n01443537"). If None, all."""
    limit: Count | None = None
    """Train on at most this many examples."""
    sampling: Literal["shuffled", "balanced"] = "shuffled"
    """"shuffled" visits every example once per epoch. "balanced" samples all classes equally often: an epoch keeps its
    length, small classes repeat images, and large classes leave images for later epochs."""
    repeats: Annotated[int, Range(1, 100)] = 1
    """Repeated augmentation: each batch has this many copies of each of its examples, with other random numbers. An
    epoch keeps its length, so it visits only one example of every `repeats`."""
    train: str | None = None
    """The training split: its folder, its solution file or table, its Parquet or .tar files as a pattern, or its name
    for hf: and tfds:. If None, the value in datasets.toml, else LOC_train_solution.csv, or what is called train."""
    val: str | None = None
    """The validation split, as for `train`; the solution file is LOC_val_solution.csv."""
    columns: Names = ()
    """Columns of a table of images, as image=NAME,label=NAME. Several labels, label=A,label=B, are columns of 0 and 1,
    one for each class. Columns that are not named are found by their usual names."""
    images: str | None = None
    """Folder of the images that a table names, relative to the table or to the working directory."""
    suffix: str | None = None
    """Suffix of the images, such as ".png", if the rows of a table hold ids."""
    targets: Literal["shares", "numbers"] | None = None
    """What the columns of labels of a table hold in place of classes: "shares" of the classes, one column for each
    class, or "numbers" to predict. If no columns are named, all but those of other keys. If None, classes."""
    weight_column: str | None = None
    """Column of a table with the weight of each image in the loss of training."""
    label_separator: str | None = None
    """Separator of several labels in a cell of a table; " " for blanks. If None, ";" or "|" in a CSV file."""
    split_column: str | None = None
    """Column of a table that names the split or the fold of each image."""
    val_fold: Annotated[str, Requires("data.split_column")] | None = None
    """Value of `split_column` of validation images. If None, val, valid, validation, dev or, without these, test."""
    group_column: str | None = None
    """Column of a table that names the group of each image, such as a patient, or the name of a function of the path
    that a recipe adds to `jaxddp.data.division.GROUPS`. All images of a group are in one split."""
    data_dir: str | None = None
    """Folder of the data sets that tensorflow-datasets has prepared. If None, its default folder."""
    local_cache: str | None = None
    """Folder that caches the files of a URL for later epochs and runs."""
    channels: Literal[1, 3, 4] = 3
    """Number of channels of decoded files: 1 (gray), 3 (RGB) or 4 (RGBA). Arrays keep their channels."""
    bits: Literal[8, 16] = 8
    """Bits per channel of decoded files. With 8, files of 16 bits lose the lower 8; this is logged once. Arrays keep
    their type."""
    verify: Literal["first", "manifest", "never"] = "first"
    """"first" decodes each file completely before its first use, unless an earlier run or `jaxddp data check` decoded
    it. "manifest" also compares the SHA-256 of each file with `manifest` on every read. "never" skips both checks."""
    manifest: Annotated[str, Requires("data.verify", ("manifest",))] | None = None
    """Manifest that `jaxddp data check` wrote. If None, the default name in the working directory or at the data."""
    workers: Annotated[int, Range(0, 1024)] = 0
    """Number of processes that decode images. If 0, threads of this process do, up to about 5,000 images per second."""
    bad_images: Literal["fail", "substitute"] = "fail"
    """What to do with an unusable training image: "fail" ends the run; "substitute" replaces it by one of its class."""
    max_bad_images: Annotated[Share, Requires("data.bad_images", ("substitute",))] = 0.001
    """Largest fraction of an epoch's images that may be substituted, rounded to a whole number, at least one."""
    labels_per_class: Count | None = None
    """Use the labels of only this many examples of each class for training."""
    labels_seed: Annotated[Seed, Requires("data.labels_per_class")] = 0
    """Seed that chooses the examples of `labels_per_class`."""
    unlabelled: str | None = None
    """Images without labels, for objectives that use them: "train" for all training images, a folder of images, or
    anything that `path` accepts. Their labels are ignored."""
    grow_from: Pixels | None = None
    """Progressive resizing: training begins with images of this side, which grows to `image_size`."""
    grow_start: Annotated[Duration, Requires("data.grow_from")] = Duration.parse("0 steps")
    """When the images begin to grow. Their side then grows linearly with the step."""
    grow_end: Annotated[Duration, Requires("data.grow_from")] = Duration.parse("80%")
    """When the images reach `image_size`."""
    grow_by: Annotated[Pixels, Requires("data.grow_from")] = 32
    """The growing side is rounded to a multiple of this. The step is compiled once for each side."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        check_values(self, "data.")
        _check_area("data.crop_area", self.crop_area)
        _ = self.named_columns
        if self.fold_of and self.val_share is not None:
            raise InputError(Key("data.fold", self.fold), ": takes the place of ", Key("data.val_share"), "; give one")

    @cached_property
    def named_columns(self) -> dict[str, tuple[str, ...]]:
        """The names of `columns` for "image" and "label"."""
        pairs = [text.partition("=")[::2] for text in self.columns]
        named = {role: tuple(name.strip() for each, name in pairs if each == role) for role in ("image", "label")}
        if sum(map(len, named.values())) < len(pairs) or "" in sum(named.values(), ()) or len(named["image"]) > 1:
            raise InputError(Key("data.columns", self.columns), ": expected image=NAME,label=NAME, or one of the two")
        return {role: names for role, names in named.items() if names}

    @cached_property
    def fold_of(self) -> tuple[int, int] | None:
        """The numbers of `fold`, such as (0, 5); None if it is not set."""
        if self.fold is None:
            return None
        number, _, count = self.fold.partition("/")
        if number.isdecimal() and count.isdecimal() and int(number) < int(count) != 1:
            return int(number), int(count)
        raise InputError(Key("data.fold", self.fold), ": expected a fold and the number of folds, 0/5 to 4/5 for five")

    @property
    def held_out(self) -> Key | None:
        """The key that holds images out for validation, with its value."""
        if self.val_share is None:
            return None if self.fold is None else Key("data.fold", self.fold)
        return Key("data.val_share", self.val_share, f"{self.val_share:g}")

    def of_process(self, index: int) -> "DataConfig":
        """Return the config with the number of a process in place of {process}."""
        return replace(self, **{key: getattr(self, key).replace(PROCESS, str(index)) for key in self.keys_of_process})

    @property
    def keys_of_process(self) -> tuple[str, ...]:
        """The keys whose values contain {process}, if each process has its own data."""
        places = ("path", "train", "val", "data_dir", "manifest", "images") if self.placement == "local" else ()
        return tuple(key for key in places if PROCESS in (getattr(self, key) or ""))

    @property
    def of_evaluation(self) -> "DataConfig":
        """The config for images of evaluation: `eval_size` replaces `image_size`."""
        return self if self.eval_size is None else replace(self, image_size=self.eval_size)
