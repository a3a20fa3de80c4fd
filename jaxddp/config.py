"""One tree of frozen dataclasses says what a run is; a config file's `get_config()` returns it.

A child config begins with another and says only what differs:

    def get_config():
        return load("imagenet_resnet50").replace(model={"name": "resnet34"})

The settings are the recipe, never the machine: batch sizes are global, and the number of devices changes nothing but,
where `model.batch_norm` is local, which slice of the batch is normalized together.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxddp.batch_statistics import BatchStatistics
from jaxddp.duration import Duration
from jaxddp.errors import about
from jaxddp.layers import Layers, assignments, factor
from jaxddp.overrides import check_values, plain, replaced
from jaxddp.ranges import Range, Seconds, Share

Pixels = Annotated[int, Range(1, 10_000)]
BatchSize = Annotated[int, Range(1, 2**24)]
HeldOut = Annotated[float, Range(0, 1, above=True, below=True)]
Strength = Annotated[float, Range(0, 1000)]
Spread = Annotated[float, Range(0, 1, above=True)]
Decay = Annotated[float, Range(0, 1, below=True)]
Views = Literal["one", "mirror", "mirror_translate"]


def _names(words: tuple[str, ...]) -> tuple[str, ...]:
    """A terminal's `--log.to jsonl,tensorboard` is one word."""
    return tuple(name.strip() for word in words for name in word.split(",") if name.strip())


@dataclass(frozen=True)
class AugmentConfig:
    """What is done to training images on the device, a function of (seed, epoch, row)."""

    flip: bool = True
    """Mirror half of the images, left to right."""
    alternate_flip: bool = False
    """Instead of `flip`: mirror half of the images in the first epoch, and then each one in every other epoch."""
    pad: Annotated[int, Range(0, 10_000)] = 0
    """Pad by this many pixels, then crop the image's size at random."""
    border: Literal["black", "reflect"] = "black"
    """What `pad` adds: black pixels, or the image mirrored at its edge."""
    rand_augment: Annotated[int, Range(0, 100)] = 0
    """Layers of RandAugment, each one of 14 operations; 0 none."""
    rand_magnitude: Annotated[float, Range(0, 10)] = 9.0
    """How strong RandAugment's operations are, 0 to 10."""
    cutout: Annotated[int, Range(0, 10_000)] = 0
    """Side in pixels of a black square at a random place; 0 none."""
    erase: Share = 0.0
    """Probability that a random rectangle is replaced by the mean colour."""
    mixup: Strength = 0.0
    cutmix: Strength = 0.0
    """The alpha of the Beta distribution that weighs an image and its neighbour, blended or with one's box in the
    other; 0 none, both: half of the pairs each."""
    then: tuple[str, ...] = ()
    """Further augmentations by name, in this order, after those above and before images are mixed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "then", _names(self.then))


@dataclass(frozen=True)
class DataConfig:
    """Which examples, and how an image becomes a square of pixels."""

    path: str | None = None
    """Where the data lie: a folder with solution files, a CSV file, Parquet, packed records, a folder a class, IDX,
    CIFAR or NumPy files; a URL (s3://, gs://, https://) of solution files; or tfds:NAME. Or give `name`."""
    name: str | None = None
    """Name of a data set in datasets.toml (the file JAXDDP_DATASETS names, or the one in the working directory)."""
    train: str | None = None
    val: str | None = None
    """Solution files; where absent, those of datasets.toml, else LOC_train_solution.csv and LOC_val_solution.csv."""
    data_dir: str | None = None
    """Where tensorflow-datasets keeps its prepared sets; its own default where absent."""
    local_cache: str | None = None
    """Folder that keeps what was fetched from a URL, for later epochs and runs."""
    val_share: HeldOut | None = None
    """Where there is no validation split: validate on this share of each class, chosen by a hash of the names."""
    classes: str | None = None
    """A range of the synset mapping ("0:200") or synset names ("n01440764,n01443537"); all where absent."""
    limit: Annotated[int, Range(1, 2**31 - 1)] | None = None
    """Train on this many examples only."""
    bad_images: Literal["fail", "substitute"] = "fail"
    """A training image that cannot be used ends the run, or is substituted by another of its class, and counted."""
    max_bad_images: Share = 0.001
    """The share of an epoch's images that may be substituted, rounded to the nearest number, but at least one."""
    image_size: Pixels = 224
    channels: Literal[1, 3, 4] = 3
    """What files are decoded to: 1 gray, 3 RGB, 4 RGBA. Arrays keep theirs."""
    bits: Literal[8, 16] = 8
    """Of a decoded value. Of files with 16, 8 keep the upper half, which is said once. Arrays keep theirs."""
    crop: Literal["random_area", "whole"] = "random_area"
    """Training crops: a random area resized to image_size, or the whole image (small images; see `augment.pad`)."""
    crop_area: tuple[Share, Share] = (0.08, 1.0)
    """Smallest and largest share of the image that a random-area crop covers."""
    resize: Pixels = 256
    """Evaluation: the short side is resized to this, and the center image_size square is taken."""
    cache: Literal["none", "device"] = "none"
    """Read training images batch by batch, or decode all of them once and keep their pixels on each device."""
    mean: tuple[Share, ...] = (0.485, 0.456, 0.406)
    std: tuple[Spread, ...] = (0.229, 0.224, 0.225)
    """Of each channel, or one for all, of values from 0 to 1: an image becomes (image - mean) / std."""
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass(frozen=True)
class ModelConfig:
    """Which network; a name is resolved by jaxddp.models."""

    name: str = "resnet50"
    width: Annotated[int, Range(1, 4096)] = 64
    stem: Literal["imagenet", "small"] = "imagenet"
    """7x7 stride 2 and max-pool, or one 3x3 for images of about 32 pixels."""
    batch_norm: str = "local"
    """Over which images batch norm takes its statistics: "local", each device's slice of the batch; "sync", the global
    batch; "ghost:K", every K consecutive images of it, so that they are the same on any number of devices."""
    zero_init_last_scale: bool = True
    weight_init: str = "he_normal"
    drop_path: Annotated[float, Range(0, 1, below=True)] = 0.0
    """Stochastic depth of the networks that have it: the probability that an example leaves out the last block, which
    grows linearly from the first block's 0."""
    weights: str | None = None
    """Start from these: a .safetensors or a .pth file with the names of torchvision or timm, or a run's work directory,
    of which the best checkpoint is taken. A head for other classes is left out."""
    freeze: str | None = None
    """Layers that are not trained, by how their names begin: "conv1,layer1", or "all but fc", a linear probe. Their
    batch norms keep and use the running statistics."""
    unfreeze: tuple[str, ...] = ()
    """Layers that are trained only after so much of the run: "layer4=1 epoch,layer3=20%". Their batch norms keep and
    use the running statistics throughout."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unfreeze", _names(self.unfreeze))

    @property
    def batch_statistics(self) -> BatchStatistics:
        """What `batch_norm` says. Raises: InputError; it says nothing."""
        return BatchStatistics.parse(self.batch_norm)

    @property
    def frozen(self) -> Layers:
        """What `freeze` says. Raises: InputError; it says nothing."""
        return Layers.parse(self.freeze or "", "model.freeze")

    @property
    def settled(self) -> Layers:
        """Whose batch norms keep their running statistics."""
        return replace(self.frozen, also=tuple(self.thawed))

    @property
    def thawed(self) -> dict[str, Duration]:
        """When each layer of `unfreeze` is trained from. Raises: InputError; it says nothing."""
        found = assignments(self.unfreeze, "model.unfreeze")
        with about("model.unfreeze"):
            return {layer: Duration.parse(value) for layer, value in found.items()}


@dataclass(frozen=True)
class TrainConfig:
    """How much, and over what batches."""

    batch_size: BatchSize = 256
    """Global: divided among all devices of all processes."""
    duration: Duration = field(default_factory=lambda: Duration.parse("90 epochs"))
    label_smoothing: Annotated[float, Range(0, 1, below=True)] = 0.0
    accumulate: Annotated[int, Range(1, 65_536)] = 1
    """Compute each device's share of a batch in this many microbatches, one after the other, to save memory. With
    batch norm local, a microbatch is what is normalized together."""
    precision: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the computation; parameters, batch statistics and loss stay float32. Where absent, float32 on a CPU and
    bfloat16 on a GPU. In float16 the loss is scaled, by as much as its gradients bear."""
    gradient_precision: Literal["bfloat16"] | None = None
    """In which gradients travel between devices: half of the bytes, with a rounding of each. Their own where absent."""
    max_bad_steps: Annotated[int, Range(0, 1_000_000)] = 10
    """A step whose gradient is not finite changes nothing; after so many in a row the run ends. 0 leaves the guard out:
    such a step is taken, and the run ends. In float16 it stays, and the first that no loss scale mends ends the run."""


@dataclass(frozen=True)
class LossConfig:
    """What is minimized."""

    name: str = "cross_entropy"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer and its schedule; batch norm and biases are never decayed."""

    name: str = "momentum"
    learning_rate: Annotated[float, Range(0, 1_000_000)] = 0.1
    """The peak, for the global batch size of this config."""
    schedule: str = "cosine"
    warmup: Duration = field(default_factory=lambda: Duration.parse("5%"))
    momentum: Decay = 0.9
    nesterov: bool = True
    beta2: Decay = 0.999
    weight_decay: Annotated[float, Range(0, 100)] = 1e-4
    step_at: tuple[Share, ...] = (1 / 3, 2 / 3, 8 / 9)
    """Schedule "step": the shares of the run at which the rate is multiplied by step_factor."""
    step_factor: Share = 0.1
    end_factor: Share = 0.0
    """Schedule "linear": the share of the peak at which the run ends."""
    rate_factors: tuple[str, ...] = ()
    """What multiplies the learning rate of layers: "conv1=0.1,fc=10". Of several that begin a name, the longest."""
    layer_decay: Annotated[float, Range(0, 1, above=True)] = 1.0
    """Each layer's rate is this multiple of the next one's, the head's being the learning rate."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate_factors", _names(self.rate_factors))

    @property
    def factors(self) -> dict[str, float]:
        """What `rate_factors` says. Raises: InputError; it says nothing."""
        found = assignments(self.rate_factors, "optimizer.rate_factors")
        return {layer: factor(value, f"optimizer.rate_factors: {layer}") for layer, value in found.items()}


@dataclass(frozen=True)
class EvalConfig:
    """When and how to validate."""

    every: Duration = field(default_factory=lambda: Duration.parse("1 epoch"))
    batch_size: BatchSize = 256
    metrics: tuple[str, ...] = ("top1", "top5")
    """What is measured beside the loss, in training too; a top-k of no fewer than all classes is left out."""
    views: Views = "one"
    """Test-time augmentation: classify an image by the mean of its logits and those of its mirror image, or also of
    copies translated by a pixel; twice or six times the work."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", _names(self.metrics))


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept: the last `keep` checkpoints and the best one by validation top-1."""

    every: Duration = field(default_factory=lambda: Duration.parse("1 epoch"))
    keep: Annotated[int, Range(1, 1_000_000)] = 2


@dataclass(frozen=True)
class LogConfig:
    """What is watched."""

    every: Duration = field(default_factory=lambda: Duration.parse("50 steps"))
    to: tuple[str, ...] = ("jsonl", "curves", "parameters", "tensorboard")
    """The loggers: "jsonl" writes metrics.jsonl and result.json, "curves" draws curves.png from it, "parameters" lists
    the network's in parameters.txt, "tensorboard" writes event files."""
    profile: Duration | None = None
    """Trace this much ("10 steps") for TensorBoard's profiler, from a few steps after the first on, into the work
    directory's profile/; nothing where absent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", _names(self.to))


@dataclass(frozen=True)
class ParallelConfig:
    """On what it runs; never part of the recipe."""

    devices: Annotated[int, Range(1, 100_000)] | None = None
    """Use this many devices of all; all where absent."""
    cpu_devices: Annotated[int, Range(1, 1024)] | None = None
    """Simulate this many devices on the CPU, in each process."""
    buckets: Annotated[int, Range(1, 1024)] | None = None
    """Average gradients in at most this many all-reduces, each of which starts when its gradients are ready. Where
    absent, 7 on several GPUs and 1 elsewhere."""
    reproducible: bool = False
    """The same bits on 1, 2, 4 and 8 devices: a batch is computed in 8 fixed shards, which are summed in a fixed order.
    It takes longer."""
    xla_options: tuple[str, ...] = ()
    """XLA's options for the compiled training step, as NAME=VALUE; see jaxddp/engine/compiler_options.py."""
    check_replicas: Duration = field(default_factory=lambda: Duration.parse("1000 steps"))
    """How often to compare the state of all devices, beside the times at which it is saved; "0 steps" never does."""
    self_test: Literal["auto", "always", "never"] = "auto"
    """Before the first step, compare the averaged gradient of a few examples with that of one device; "auto" where
    that is expected to take less than a second."""
    start_timeout: Seconds = 60.0
    """Seconds that the processes of a job wait for each other at the start."""
    heartbeat_timeout: Seconds = 10.0
    """Seconds without a sign of life after which a process counts as lost, and the job ends."""
    shutdown_timeout: Seconds = 60.0
    """Seconds that a process waits for the others at the end."""


@dataclass(frozen=True)
class Config:
    """Everything that decides a run.

    Raises:
        InputError: a value of another type than its field's, or out of its range.
    """

    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_values(self)
        # What is written in a form of its own is read once here, so that a mistake is said before anything starts.
        _ = self.model.batch_statistics, self.model.frozen, self.model.thawed, self.optimizer.factors

    def replace(self, **changes: Any) -> "Config":
        """A copy with the given keys changed: `config.replace(seed=1, train={"duration": "10 epochs"})`.

        Raises:
            InputError: an unknown key (the nearest right one is named), or a value of another type or out of range.
        """
        return replaced(self, changes)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as config.json holds them; `Config().replace(**d)` is its inverse."""
        return plain(self)


def load(name_or_path: str | Path) -> Config:
    """The config of a recipe: its `get_config()`, or what a run wrote into its config.json.

    Args:
        name_or_path: a name in the project's configs/ (`"imagenet_resnet50"`), the path of a Python file, or that of
            the config.json in a run's work directory. Within a recipe file a relative path begins beside that file,
            and the hooks of the recipe that is loaded are inherited.

    Raises:
        InputError: see `jaxddp.recipe_file.read_recipe`.
    """
    from jaxddp.recipe_file import read_recipe  # it makes configs

    return read_recipe(name_or_path).config
