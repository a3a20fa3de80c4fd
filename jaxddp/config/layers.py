"""Texts of a config about layers: selections and settings by a prefix of their names, batch norm, initial weights."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from jaxddp.config.values import Text, checked
from jaxddp.core.errors import InputError, Key, about, choices, counted, nearest, show
from jaxddp.core.ranges import Factor, Range, WeightDecay

T = TypeVar("T")
_ALL_BUT = "all but "
HEADS = ("head", "fc")
"""The names of the heads of built-in networks."""
THE_HEAD = "the head"
"""The prefix that selects the head by either name. It counts as the shortest one."""
ADAPTERS = "lora"
"""The first part of the names of the adapters of `model.lora`, such as "lora/blocks_0/mlp/fc1/kernel/a"."""
SIMSIAM = "simsiam"
"""The first part of the names of SimSiam's projector and predictor, and the name of the objective."""
ADDED = (ADAPTERS, SIMSIAM)
"""The entries that training adds to the parameters of a network."""
_SEPARATOR = re.compile("[/._]")


@dataclass(frozen=True)
class Layers:
    """A selection of layers by prefixes of their names.

    Names are compared word by word. Words are separated by "/", "." or "_": "layer1" and "layer1.0" match
    "layer1_0/conv1/kernel", but do not match "layer10/kernel". "*" is any one word: "blocks.*.attn".
    """

    prefixes: tuple[str, ...] = ()
    inverted: bool = False
    """Whether to select all layers except the layers of `prefixes` and `ADDED`."""
    additional: tuple[str, ...] = ()
    """Prefixes of further selected layers, regardless of `inverted`."""

    @classmethod
    def parse(cls, text: str, key: str) -> "Layers":
        """Parse "conv1,layer1" or "all but layer4,fc"; "" selects no layer. Raises: InputError about `key`."""
        inverted = text.startswith(_ALL_BUT)
        names = tuple(name.strip() for name in text.removeprefix(_ALL_BUT).split(",")) if text.strip() else ()
        if not all(names):
            raise InputError(Key(key, text), ": expected prefixes of layer names, as in 'conv1,layer1' or 'all but fc'")
        return cls(names, inverted)

    def __bool__(self) -> bool:
        return bool(self.prefixes or self.additional)

    def __contains__(self, name: str) -> bool:
        """Return whether a variable's path within its collection, such as "layer1_0/conv1/kernel", is selected."""
        return self.selects(name)

    def selects(self, *names: str) -> bool:
        """Return whether an object with one or more names is selected by any of them."""
        more = any(has_prefix(prefix, name) for prefix in self.additional for name in names)
        matches = any(has_prefix(prefix, name) for prefix in self.prefixes for name in names)
        matches |= self.inverted and any(name.partition("/")[0] in ADDED for name in names)
        return more or (bool(self.prefixes) and matches != self.inverted)

    def check(self, names: Iterable[str], key: str) -> None:
        """Raise `InputError` if a prefix matches none of the parameters' names, or if two layers may be the head."""
        parameters = list(names)
        known = dict.fromkeys(name.partition("/")[0] for name in parameters)
        for prefix in self.prefixes:
            if prefix == THE_HEAD and {*HEADS} <= known.keys():
                raise InputError(Key(key), f": {THE_HEAD} may be either of {' and '.join(HEADS)}", advice="name one")
            if not any(has_prefix(prefix, name) for name in parameters):
                near = {"fc": "head", "head": "fc"}.get(prefix, prefix)
                raise InputError(Key(key), f": no layer's name begins with {show(prefix)}", advice=choices(near, known))


NO_LAYERS = Layers()
_GHOST = re.compile("ghost:([1-9][0-9]{0,7})")
_COLON = re.compile(r"\s*:\s*")
_SETTINGS: dict[str, Any] = {"rate": Factor, "decay": WeightDecay, "frozen": Literal["true"]}


@dataclass(frozen=True)
class LayerSettings:
    """Optimizer settings of single layers, by prefixes of their names: factors of the rate, decays, frozen layers."""

    rates: dict[str, float] = field(default_factory=dict)
    decays: dict[str, float] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    @classmethod
    def parse(cls, texts: Iterable[str], key: str) -> "LayerSettings":
        """Parse "fc:rate=10", "fc:decay=0" and "conv1:frozen=true". Raises: InputError, also for a second value."""
        values: dict[str, dict[str, Any]] = {setting: {} for setting in _SETTINGS}
        form = "LAYER:rate=X, LAYER:decay=X or LAYER:frozen=true"
        for name, value in assignments([_COLON.sub(":", text) for text in texts], key, form=form).items():
            layer, _, setting = name.partition(":")
            if not layer or setting not in _SETTINGS:
                raise InputError(Key(key), f": {show(f'{name}={value}')}: expected {form}")
            with about(Key(key)):
                values[setting][layer] = checked(Text(value), _SETTINGS[setting], f"{layer}:{setting}")
        return cls(values["rate"], values["decay"], tuple(values["frozen"]))


def longest_match(values: Mapping[str, T], name: str, default: T) -> T:
    """Return the value of the longest prefix that matches a name, or the default."""
    matching = [layer for layer in values if has_prefix(layer, name)]
    return values[max(matching, key=lambda layer: (layer != THE_HEAD, len(layer)))] if matching else default


def has_prefix(prefix: str, name: str) -> bool:
    """Return whether a name begins with the words of a prefix."""
    words, first = _SEPARATOR.split(prefix), _SEPARATOR.split(name)
    if prefix == THE_HEAD:
        return first[0] in HEADS
    return len(words) <= len(first) and all(word in ("*", other) for word, other in zip(words, first, strict=False))


def assignments(pairs: Iterable[str], key: str, kind: Any = str, form: str = "LAYER=VALUE") -> dict[str, Any]:
    """Parse pairs such as "layer4=0.1" into a dict. Raises: InputError if one is invalid, or a layer is given twice."""
    values: dict[str, str] = {}
    for pair in pairs:
        layer, equals, value = (part.strip() for part in pair.partition("="))
        if not layer or not equals or not value:
            raise InputError(Key(key), f": {show(pair)}: expected {form}")
        if repeated := [other for other in values if _SEPARATOR.split(other) == _SEPARATOR.split(layer)]:
            problem = f": {show(layer)} has two values, {values[repeated[0]]} and {value}; give only one"
            raise InputError(Key(key), problem)
        values[layer] = value
    with about(Key(key)):
        return {layer: checked(Text(value), kind, layer) for layer, value in values.items()}


@dataclass(frozen=True)
class BatchStatistics:
    """The images over which batch norm computes its statistics: by default all images of a device."""

    axis_name: str | None = None
    """The mesh axis over which statistics are averaged, for the statistics of the global batch."""
    group: int | None = None
    """The number of consecutive images that are normalized together, the ghost batch of Hoffer et al. 2017
    (arXiv:1705.08741). Such statistics are the same on any number of devices."""

    @classmethod
    def parse(cls, text: str) -> "BatchStatistics":
        """Parse "local", "sync" or "ghost:K". Raises: InputError, which suggests the nearest form."""
        named = {"local": cls(), "sync": cls(axis_name="data")}
        if text in named:
            return named[text]
        if ghost := _GHOST.fullmatch(text):
            return cls(group=int(ghost[1]))
        expected = "'local', 'sync' or 'ghost:K' (K images are normalized together, 1 to 99,999,999)"
        raise InputError(Key("model.batch_norm", text), f": expected {expected}{nearest(text, named)}")

    def check(self, batch_size: int, shares: int) -> None:
        """Check that each part of the global batch consists of complete ghost batches. Raises: InputError.

        Devices, shards and microbatches divide the batch into `shares` equal parts.
        """
        share = batch_size // shares
        if self.group is None or share % self.group == 0:
            return
        whole = self.group * shares
        below, above = batch_size // whole * whole, -(-batch_size // whole) * whole
        fitting = f"{below}, {above}" if below else f"{above}"
        group = max(size for size in range(1, min(self.group, share) + 1) if share % size == 0)
        key = Key.plain("model.batch_norm", f"ghost:{self.group}")
        problem = key, f" normalizes {counted(self.group, 'image')} together, but ", Key("train.batch_size", batch_size)
        parts = f" is computed in {counted(shares, 'part')} of {share}"
        raise InputError(*problem, parts, advice=f"a batch of {fitting}, or ghost:{group}, would do")


_FAMILIES = ("he", "xavier", "glorot", "lecun")
_NAMES = (*(f"{family}_{kind}" for family in _FAMILIES for kind in ("normal", "uniform")), "orthogonal", "zeros")
_PATTERN = re.compile(r"(normal|truncated_normal)(?:\(([^()]*)\))?")
_Deviation = Annotated[float, Range(0, 100, above=True)]


def parse_weight_init(text: str) -> tuple[str, float | None]:
    """Parse a name such as "he_normal", "normal" (deviation 0.01) or "normal(0.02)". Raises: InputError.

    Returns: the name of a distribution, and for "normal" and "truncated_normal" its standard deviation.
    """
    if text in _NAMES:
        return text, None
    if (match := _PATTERN.fullmatch(text)) is None:
        names = (*_NAMES, "normal(0.02)", "truncated_normal(0.02)")
        raise InputError(Key("model.weight_init"), f": unknown weight_init {show(text)}; {choices(text, names)}")
    with about(Key("model.weight_init", text)):
        return match[1], checked(Text(match[2] or "0.01"), _Deviation, "standard deviation")
