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
from jaxddp.data_config import AugmentConfig as AugmentConfig
from jaxddp.data_config import DataConfig
from jaxddp.duration import Duration
from jaxddp.errors import about
from jaxddp.layers import Layers, assignments, factor
from jaxddp.overrides import check_values, names_of, plain, replaced
from jaxddp.ranges import Range, Seconds, Share

BatchSize = Annotated[int, Range(1, 2**24)]
Decay = Annotated[float, Range(0, 1, below=True)]
ShownImages = Annotated[int, Range(0, 256)]
Views = Literal["one", "mirror", "mirror_translate"]
Precision = Literal["float32", "bfloat16", "float16"]


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
    of which the best checkpoint is taken. A head for another number of classes is left out."""
    new_layers: str | None = None
    """Layers that take nothing from the weights, by how their names begin: "fc", a head for other classes."""
    freeze: str | None = None
    """Layers that are not trained, by how their names begin: "conv1,layer1", or "all but fc", a linear probe. Their
    batch norms keep and use the running statistics."""
    unfreeze: tuple[str, ...] = ()
    """Layers that are trained only after so much of the run: "layer4=1 epoch,layer3=20%". Their batch norms keep and
    use the running statistics throughout."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "unfreeze", names_of(self.unfreeze))

    @property
    def batch_statistics(self) -> BatchStatistics:
        """What `batch_norm` says. Raises: InputError; it says nothing."""
        return BatchStatistics.parse(self.batch_norm)

    @property
    def new(self) -> Layers:
        """What `new_layers` says. Raises: InputError; it says nothing."""
        return Layers.parse(self.new_layers or "", "model.new_layers")

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
    precision: Precision | None = None
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
        object.__setattr__(self, "rate_factors", names_of(self.rate_factors))

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
        object.__setattr__(self, "metrics", names_of(self.metrics))


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
    the network's in parameters.txt, "tensorboard" writes event files, "wandb" and "mlflow" tell Weights & Biases and
    MLflow, which each are an extra of the package. If one but "jsonl" fails, a line says so and the run goes on."""
    images: ShownImages | None = None
    """Of how many validation images each evaluation's predictions are shown, by "wandb", "mlflow" and "tensorboard".
    Where absent, 16 if "wandb" or "mlflow" is named, and none otherwise."""
    profile: Duration | None = None
    """Trace this much ("10 steps") for TensorBoard's profiler, from a few steps after the first on, into the work
    directory's profile/; nothing where absent."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "to", names_of(self.to))


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
        _ = self.model.batch_statistics, self.model.new, self.model.frozen, self.model.thawed, self.optimizer.factors

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
