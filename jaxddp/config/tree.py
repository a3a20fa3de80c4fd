"""The config of a run: a frozen dataclass with one field for each section. `data_section` has the section `data`."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

import jaxddp.config.registry as registry
import jaxddp.core.ranges as ranges
from jaxddp.config.data_section import DataConfig
from jaxddp.config.goal import VAL, VAL_EMA, Goal
from jaxddp.config.layers import THE_HEAD, BatchStatistics, Layers, LayerSettings, assignments, parse_weight_init
from jaxddp.config.registry import Requires, SectionOfChoices
from jaxddp.config.values import Names, Text, check_values, checked, flatten, nested, plain, replaced
from jaxddp.core.duration import Duration
from jaxddp.core.errors import InputError, Key
from jaxddp.core.shares import Shares

NETWORK_KEYS = ("name", "width", "stem", "shortcut_norm", "blur_pool")
"""The keys of `model` that determine a network's arrays and its output."""


@dataclass(frozen=True)
@registry.MODELS.complete
class ModelConfig(SectionOfChoices):
    """The network, and the weights that it starts from."""

    name: str = "resnet50"
    """Name of a network in jaxddp/models/."""
    weights: str | None = None
    """Initial weights: a name of published weights, such as timm/resnet50.a1_in1k or
    torchvision/ResNet50_Weights.IMAGENET1K_V2 (`jaxddp weights` lists them); hf://owner/name, a repository of the
    Hugging Face Hub, or hf://owner/name/file; a .safetensors or .pth file with parameter names of torchvision or timm;
    a folder that `jaxddp export --format hub` wrote; or the work directory of a run, whose best checkpoint is used. A
    head for another number of classes is not loaded."""
    offline: bool = False
    """Do not fetch `weights`. They must be on this machine, because an earlier run fetched them."""
    freeze: str | None = None
    """Layers that are not trained, by the beginning of their names: "conv1,layer1", or "all but the head".
    Their batch norms use the running statistics and do not change them."""
    new_layers: str | None = None
    """Layers that are initialized even if `weights` has them, by the beginning of their names, such as "the head"."""
    unfreeze: Names = ()
    """Layers that are trained only after a part of the run: "layer4=1 epoch,layer3=20%". Their batch norms use the
    running statistics throughout and do not change them."""
    lora: Annotated[int, ranges.Range(1, 65536)] | None = None
    """Rank of LoRA's adapters of frozen kernels of attention and dense layers. By default, `freeze` is then "all but
    the head" and the layers of `new_layers` and `unfreeze`."""
    lora_alpha: Annotated[ranges.Positive, Requires("model.lora")] = 8.0
    """The adapters are multiplied by `lora_alpha` / `lora`, as in the paper. The default is peft's."""
    lora_layers: Annotated[str | None, Requires("model.lora")] = None
    """Layers that get adapters: "blocks.*.attn", or "all but blocks.0". By default, all frozen ones."""
    cpu_convolutions: bool = True
    """On CPUs, compute the depthwise and grouped convolutions (`nn.Conv` with `feature_group_count`) of a recipe's own
    network as sums and products of matrices, which is many times faster. The results are equal to rounding."""

    @cached_property
    def batch_statistics(self) -> BatchStatistics:
        """The parsed `batch_norm`; local for None."""
        return BatchStatistics.parse(self.batch_norm or "local")

    @cached_property
    def initialization(self) -> tuple[str, float | None]:
        """The parsed `weight_init`; he_normal for None."""
        return parse_weight_init(self.weight_init or "he_normal")

    @cached_property
    def fresh_layers(self) -> Layers:
        """The parsed `new_layers`."""
        return Layers.parse(self.new_layers or "", "model.new_layers")

    @cached_property
    def frozen(self) -> Layers:
        """The parsed `freeze`, without adapters."""
        if self.lora is not None and self.freeze is None:
            return Layers((THE_HEAD, *self.fresh_layers.prefixes, *self.unfreeze_times), inverted=True)
        return Layers.parse(self.freeze or "", "model.freeze")

    @cached_property
    def adapted(self) -> Layers:
        """The parsed `lora_layers`."""
        return Layers.parse(self.lora_layers or "", "model.lora_layers")

    @cached_property
    def unfreeze_times(self) -> dict[str, Duration]:
        """When the training of each layer of `unfreeze` begins."""
        return assignments(self.unfreeze, "model.unfreeze", Duration)


BALANCED: Literal["balanced"] = "balanced"


@dataclass(frozen=True)
@registry.LOSSES.complete
class LossConfig:
    """The loss function and the weights of classes."""

    name: str = "cross_entropy"
    """Name of a loss in jaxddp/losses.py: "cross_entropy", "nll" (for log-probabilities), "bce" (one binary decision
    per class), or "mse" or "huber" for numbers."""
    class_weights: str | None = None
    """Weight of each class in the loss, in training and evaluation: "1,4,0.5" lists one positive number per class;
    "balanced" is N / (K n_k) for a class with n_k of the N training images and K classes."""

    @cached_property
    def weights(self) -> Literal["balanced"] | tuple[float, ...] | None:
        """The parsed `class_weights`."""
        if self.class_weights is None or self.class_weights == BALANCED:
            return self.class_weights
        weights = [Text(word) for word in self.class_weights.split(",")]
        return checked(weights, tuple[ranges.Positive, ...], "loss.class_weights")


@dataclass(frozen=True)
@registry.OBJECTIVES.complete
class ObjectiveConfig(SectionOfChoices):
    """The function that a training step minimizes. It includes the loss."""

    name: str = "supervised"
    """Name of an objective: "supervised" (the loss on the labels), "distillation", "fixmatch", "jensen_shannon" or
    "simsiam" (no labels)."""


BatchSize = Annotated[int, ranges.Range(1, 2**24)]
Precision = Literal["float32", "bfloat16", "float16"]
ProgramPrecision = Literal["float32", "float16", "int8"]
"""The precision of an exported program. int8: that of convolutions and matrix products."""


@dataclass(frozen=True)
class TrainConfig:
    """The length of the run, its batches, and options of the training step."""

    batch_size: BatchSize = 256
    """Global batch size, divided among all devices of all processes."""
    duration: Duration = Duration.parse("90 epochs")
    """Length of the run: "90 epochs", "5000 steps" or "1_000_000 examples"."""
    label_smoothing: ranges.Decay = 0.0
    """Fraction of each label that is spread evenly over all classes, in training only."""
    accumulate: Annotated[int, ranges.Range(1, 65_536)] = 1
    """Gradient accumulation: each device computes its part of a batch in this many microbatches, which save memory.
    Local batch norm normalizes each of them separately."""
    remat: Literal["none", "blocks", "dots"] = "none"
    """Gradient checkpointing, which saves memory and repeats computation: the forward pass keeps only the outputs of
    blocks, or only the results of matrix products and convolutions ("dots")."""
    precision: Precision | None = None
    """Precision of the computation. Parameters, batch statistics and the loss stay float32. If None, float32 on a CPU,
    bfloat16 on a GPU or TPU. float16 uses dynamic loss scaling."""
    gradient_precision: Literal["bfloat16"] | None = None
    """Precision in which devices exchange gradients: bfloat16 halves the traffic and rounds each gradient."""
    max_bad_steps: Annotated[int, ranges.Range(0, 1_000_000)] = 10
    """A step with a non-finite gradient is skipped, and after this many skipped steps in a row the run ends. With 0, it
    ends after the first such step, which is not skipped. With float16, steps are always skipped, and the run ends at
    the first step whose gradient is not finite at any loss scale."""
    ema: ranges.Decay | None = None
    """Decay of an exponential moving average of the parameters, such as 0.999. The average is validated as "val_ema",
    and predict, export and serve use it instead of the parameters. If None, no average."""
    ema_warmup: Annotated[bool, Requires("train.ema")] = True
    """Limit the decay at step t to (1 + t)/(10 + t), so that the average soon forgets the initial parameters."""
    ema_every: Annotated[ranges.Period, Requires("train.ema")] = 1
    """Update the average once per this many steps, with the decay raised to the power of this number."""
    swa: Duration | None = None
    """Length of the last part of the run whose parameters are averaged, each step with the same weight, such as "25%".
    The average takes the place of that of `ema`. If None, no average."""
    sync_every: Duration | None = None
    """How often groups of devices (`parallel.groups`) average their parameters, such as "50 steps". Between, each group
    trains its own (local SGD). If None, all devices average the gradients of each step."""
    outer_optimizer: Annotated[Literal["mean", "nesterov"], Requires("train.sync_every")] = "mean"
    """"mean" continues from the average of the groups' parameters, "nesterov" (DiLoCo) moves to it with momentum."""
    outer_rate: Annotated[ranges.Factor, Requires("train.outer_optimizer", ("nesterov",))] = 0.7
    """Learning rate of the outer optimizer "nesterov"."""
    outer_momentum: Annotated[ranges.Decay, Requires("train.outer_optimizer", ("nesterov",))] = 0.9
    """Momentum of the outer optimizer "nesterov"."""
    lookahead: ranges.Period | None = None
    """Lookahead: the number of steps (5 is usual) after which slow weights move to the parameters and replace them."""
    lookahead_decay: Annotated[ranges.Share, Requires("train.lookahead")] = 0.5
    """Fraction of the slow weights that each Lookahead update keeps."""
    stop_after: ranges.Period | None = None
    """Early stopping: end the run after this many validations in a row without an improvement of `checkpoint.best`."""
    stop_min_gain: Annotated[ranges.Factor, Requires("train.stop_after")] = 0.0
    """Smallest change of the metric that `stop_after` treats as an improvement."""


@dataclass(frozen=True)
@registry.SCHEDULES.complete
@registry.OPTIMIZERS.complete
class OptimizerConfig(SectionOfChoices):
    """The optimizer and its learning rate schedule."""

    name: str = "momentum"
    """Name of an optimizer in jaxddp/optimizers.py."""
    learning_rate: ranges.Factor = 0.1
    """Peak learning rate, for the batch size of this config, or for `reference_batch` if that is set."""
    schedule: str = "cosine"
    """Learning rate schedule after the warmup, by its name in jaxddp/schedules.py."""
    warmup: Duration = Duration.parse("5%")
    """Length of the linear warmup to the peak."""
    warmup_start: ranges.Share | None = None
    """Learning rate of the first step of the warmup, as a fraction of the peak. If None, 1 / (steps of the warmup)."""
    weight_decay: ranges.WeightDecay = 1e-4
    """Weight decay of kernels. Biases and the parameters of norms have none."""
    clip_norm: ranges.Positive | None = None
    """Clip the averaged gradient to this global norm."""
    reference_batch: BatchSize | None = None
    """Batch size for which `learning_rate` is given. If None, the batch size of this config."""
    scaling: Annotated[Literal["linear", "sqrt", "none"], Requires("optimizer.reference_batch")] = "linear"
    """How the learning rate scales with batch size / `reference_batch`."""
    groups: Names = ()
    """Settings of single layers, such as "fc:rate=10,fc:decay=0,conv1:frozen=true": a factor of the learning rate, a
    weight decay, or no training. A layer is named by the beginning of its name; the longest match applies."""
    rate_factors: Names = ()
    """Factors of the learning rate for single layers, as in `groups`: "conv1=0.1,fc=10"."""
    layer_decay: ranges.SomeShare = 1.0
    """Layer-wise learning rate decay: the rate of each layer is this multiple of the next layer's, up to the head's."""

    @cached_property
    def layer_settings(self) -> LayerSettings:
        """The parsed `groups`."""
        return LayerSettings.parse(self.groups, "optimizer.groups")

    @cached_property
    def layer_rate_factors(self) -> dict[str, float]:
        """The factors of layers in `rate_factors` and `groups`, of which only one may name a layer."""
        _ = assignments(self.rate_factors, "optimizer.rate_factors", ranges.Factor)
        # Checks that no layer has a rate in both.
        pairs = self.rate_factors + tuple(f"{layer}={rate}" for layer, rate in self.layer_settings.rates.items())
        return assignments(pairs, "optimizer.groups", ranges.Factor)


Views = Literal["one", "mirror", "mirror_translate"]


@dataclass(frozen=True)
class EvalConfig:
    """The validations of the run."""

    every: Duration = Duration.parse("1 epoch")
    """How often to validate. The run is also validated at its end. "0 steps" disables validation."""
    batch_size: BatchSize = 256
    """Global batch size of validation. It does not affect the metrics."""
    limit: ranges.Count | None = None
    """Validate on at most this many examples, with the same proportions of classes. If None, all."""
    metrics: Names = ("top1", "top5")
    """Metrics besides the loss, in training and validation. A top-k metric needs more than k classes in the data; it is
    left out otherwise."""
    views: Views = "one"
    """Test-time augmentation: average the logits of an image and its mirror image ("mirror"), or also of copies shifted
    by one pixel ("mirror_translate"). The cost is two or six times the cost of "one"."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The checkpoints that a run keeps: the last `keep` and the best one, which predict, export and serve use."""

    every: Duration = Duration.parse("1 epoch")
    """How often to save a checkpoint. The run also saves one at its end."""
    keep: ranges.Period = 2
    """Number of recent checkpoints to keep."""
    best: str | None = None
    """Metric that selects the best checkpoint, and that `train.stop_after` watches. Write "val" and a metric, such as
    "val loss"; or "val_ema" and a metric, for the averaged parameters (`train.ema`). If None, the top-1 accuracy of the
    parameters that predict and export use: "val_ema top1" with averaged parameters, otherwise "val top1"."""
    best_is: Literal["min", "max"] | None = None
    """Whether a lower ("min") or a higher ("max") value of that metric is better. If None, lower for the loss and the
    errors "ece" and "mae", higher for all other metrics."""
    best_smoothing: ranges.Decay = 0.0
    """Decay of the exponential moving average of the metric, corrected as in Adam, that selects the best checkpoint."""

    def goal(self, *, averages: bool) -> Goal:
        """Return the parsed `best`, `best_is` and `best_smoothing`. `averages`: whether parameters are averaged."""
        return Goal.parse(self.best or f"{VAL_EMA if averages else VAL} top1", self.best_is, self.best_smoothing)


ShownImages = Annotated[int, ranges.Range(0, 256)]
_OfTracker = Requires("log.to", ("wandb", "mlflow"))


@dataclass(frozen=True)
class LogConfig:
    """The loggers of the run, and the values that they log."""

    every: Duration = Duration.parse("50 steps")
    """How often to log the metrics of training."""
    to: Names = ("jsonl", "curves", "parameters", "tensorboard")
    """Loggers by name. "jsonl" writes metrics.jsonl and result.json, "curves" draws curves.png from metrics.jsonl,
    "parameters" lists the network's parameters in parameters.txt, "tensorboard" writes event files, "confusion" writes
    the last validation's confusion matrix to confusion.csv, and "wandb" and "mlflow" log to Weights & Biases and
    MLflow, which need the extra of the same name. If another logger than "jsonl" fails, the run continues."""
    project: Annotated[str, _OfTracker] | None = None
    """Project for "wandb", experiment for "mlflow". If None, the tracker's environment variable, else "jaxddp"."""
    name: Annotated[str, _OfTracker] | None = None
    """Name of the run for "wandb" and "mlflow". If None, WANDB_NAME, else the name of the work directory."""
    config: Annotated[Names, _OfTracker] = ()
    """Further values that "wandb" and "mlflow" record with the config: "note=baseline,fold=3"."""
    images: Annotated[ShownImages, Requires("log.to", ("tensorboard", "wandb", "mlflow"))] | None = None
    """Number of validation images whose predictions are shown. If None, 16 with "wandb" or "mlflow", otherwise none."""
    guard_formulas: Annotated[bool, Requires("log.to", ("confusion",))] = False
    """In confusion.csv, put an apostrophe before class names that a spreadsheet would read as a formula, because
    they begin with =, +, -, @, a tab or a line break."""
    gradient_norm: bool = False
    """Log the norm of the averaged gradient. With `optimizer.clip_norm` it is always logged."""
    profile: Duration | None = None
    """Length of a trace for TensorBoard's profiler, such as "10 steps". The trace starts a few steps after the first
    step and is written to profile/ in the work directory. If None, no trace."""

    @cached_property
    def recorded(self) -> dict[str, str]:
        """The parsed `config`, by name."""
        return assignments(self.config, "log.config", form="NAME=VALUE")


@dataclass(frozen=True)
class ParallelConfig:
    """The devices of the run, and the time limits of its job."""

    devices: ranges.Devices | None = None
    """Number of devices to use. If None, all."""
    cpu_devices: ranges.CpuDevices | None = None
    """Simulate this many CPU devices in each process."""
    buckets: Annotated[int, ranges.Range(1, 1024)] | None = None
    """Average gradients in at most this many all-reduces, each of which starts as soon as its gradients are ready. If
    None, 7 on GPUs, and otherwise 1."""
    shard_optimizer: bool = False
    """Divide the parameters and the optimizer's state among the devices between two steps (ZeRO stages 1 and 2). Each
    device updates its slices, which saves memory. Gradients are the same up to rounding."""
    groups: Annotated[int, ranges.Range(2, 100_000), Requires("train.sync_every")] | None = None
    """Number of groups that average their parameters every `train.sync_every`. If None, each process is a group."""
    shares: str | None = None
    """Divide each batch among the devices by speed: "3,1" gives a number for each device or each process, and "auto"
    measures the speeds at the start of the run and keeps them. If None, all devices get equal parts."""
    reproducible: bool = False
    """Give the same bits on 1, 2, 4 and 8 devices: each batch is computed in 8 shards, which is slower."""
    xla_options: tuple[str, ...] = ()
    """XLA options for the compiled training step, as NAME=VALUE; see jaxddp/engine/compilation.py."""
    check_replicas: Duration = Duration.parse("1000 steps")
    """How often to compare the states of all devices, besides before each checkpoint. "0 steps" disables the check."""
    self_test: Literal["auto", "always", "never"] = "auto"
    """Before the first step, compare the averaged gradient of a few examples with the gradient that one device
    computes. "auto" runs this test if it is expected to take less than a second."""
    start_timeout: ranges.Seconds = 60.0
    """Seconds that the processes of a job wait for each other at the start."""
    heartbeat_timeout: ranges.Seconds = 10.0
    """Seconds without a heartbeat after which a process is considered lost and the job ends."""
    stall_timeout: ranges.Seconds = 600.0
    """Seconds without progress after which a process is considered stuck and the run ends. Saving, restoring and
    validation may take 3 times as long; starting and compilation may take 6 times as long."""
    shutdown_timeout: ranges.Seconds = 60.0
    """Seconds that a process waits for the other processes at the end."""

    @property
    def division(self) -> Shares | None:
        """The parsed `shares`."""
        return None if self.shares is None else Shares.parse(self.shares)


@dataclass(frozen=True)
class Config:
    """All settings of a run. Raises: InputError if a value has the wrong type or is out of range."""

    # `MAY_CHANGE` in jaxddp/training/checkpoints/integrity.py lists the keys that a resumed run may change.

    seed: ranges.Seed = 0
    """Seed of all random values: the initial parameters, the order of examples, augmentation and dropout."""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        check_values(self)
        # Report invalid texts before the run starts. Afterwards, no property raises an error.
        _ = self.model.batch_statistics, self.model.initialization, self.model.fresh_layers, self.model.frozen
        _ = self.model.adapted, self.model.unfreeze_times, self.optimizer.layer_rate_factors, self.log.recorded
        _ = self.loss.weights, self.checkpoint.goal(averages=False), self.parallel.division
        if "curves" in self.log.to and "jsonl" not in self.log.to:
            given = Key.plain("log.to", ",".join(self.log.to))
            raise InputError(given, ": curves are drawn from metrics.jsonl", advice='name "jsonl" too')

    @cached_property
    def frozen(self) -> Layers:
        """The layers that are not trained, because of `model.freeze` or their own settings."""
        return replace(self.model.frozen, additional=self.optimizer.layer_settings.frozen)

    @cached_property
    def frozen_norms(self) -> Layers:
        """The layers whose batch norms keep their running statistics: the layers of `frozen` and `model.unfreeze`."""
        return replace(self.frozen, additional=(*self.frozen.additional, *self.model.unfreeze_times))

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with some keys changed: `config.replace(seed=1, train={"duration": "10 epochs"})`.

        A key can also be written with a dot: `config.replace(**{"train.duration": "10 epochs"})`.

        Keys that have no effect with the new values get their defaults back, unless they are changed, too:
        `optimizer={"name": "adamw"}` drops LARS's `trust_coefficient`. Raises: InputError if a key is unknown, or a
        value has the wrong type or is out of range.
        """
        flat, empty = flatten(changes), {name: value for name, value in changes.items() if value == {}}
        config = registry.reset_unread(replaced(self, nested(flat) | empty), flat.keys())
        vars(config)["replaced_keys"] = self.replaced_keys | flat.keys()
        return config

    @cached_property
    def replaced_keys(self) -> frozenset[str]:
        """The keys that `replace` has set since the config was created or loaded, also to the same value."""
        return frozenset()

    def to_dict(self) -> dict[str, Any]:
        """Return nested dicts of JSON types, as in config.json. `Config().replace(**d)` is the inverse."""
        return plain(self)

    def flat(self) -> dict[str, Any]:
        """Return the JSON types of all settings, by dotted key. `Config().replace(**d)` is the inverse of this, too."""
        return flatten(plain(self))
