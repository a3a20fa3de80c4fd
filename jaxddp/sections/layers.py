"""Selections of layers by the beginning of their names, for freezing, unfreezing and settings of single layers."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from jaxddp.core.errors import InputError, about
from jaxddp.core.message import Key
from jaxddp.core.ranges import Factor, WeightDecay
from jaxddp.core.wording import choices, show
from jaxddp.overrides import read_number

T = TypeVar("T")
_OTHERS = "all but "
_SEPARATOR = re.compile("[/._]")


@dataclass(frozen=True)
class Layers:
    """A selection of layers by the beginning of their names.

    Names are compared word by word, and "/", "." and "_" separate words: "layer1" and "layer1.0" select
    "layer1_0/conv1/kernel", and "layer1" does not select "layer10/kernel".

    Attributes:
        prefixes: the beginnings of the names.
        others: whether all layers but those of `prefixes` are selected.
        also: beginnings of further layers that are selected.
    """

    prefixes: tuple[str, ...] = ()
    others: bool = False
    also: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, key: str) -> "Layers":
        """Parse "conv1,layer1" or "all but layer4,fc". Empty text selects none. Raises: InputError; names the key."""
        others = text.startswith(_OTHERS)
        names = tuple(name.strip() for name in text.removeprefix(_OTHERS).split(",")) if text.strip() else ()
        if not all(names):
            form = "'conv1,layer1' or 'all but fc'"
            raise InputError(Key(key, text), f": expected how names of layers begin, as in {form}")
        return cls(names, others)

    def __bool__(self) -> bool:
        return bool(self.prefixes or self.also)

    def __contains__(self, name: str) -> bool:
        """Whether a variable is selected, by its path within its collection, such as "layer1_0/conv1/kernel"."""
        return self.holds(name)

    def holds(self, *names: str) -> bool:
        """Whether a variable with several names is selected by any of them."""
        named, also = (any(begins(p, name) for p in each for name in names) for each in (self.prefixes, self.also))
        return also or (bool(self.prefixes) and named != self.others)

    def check(self, names: Iterable[str], key: str) -> None:
        """Raise `InputError` if a prefix selects none of the parameters."""
        known = list(names)
        for prefix in self.prefixes:
            if not any(begins(prefix, name) for name in known):
                tops = dict.fromkeys(name.partition("/")[0] for name in known)
                told = f": no layer's name begins with {show(prefix)}"
                raise InputError(Key(key), told, advice=choices(prefix, tops))


NO_LAYERS = Layers()


@dataclass(frozen=True)
class Groups:
    """Optimizer settings of single layers, by the beginning of their names.

    Attributes:
        rates: factors of the learning rate.
        decays: weight decays, instead of the config's.
        frozen: layers that are not trained.
    """

    rates: dict[str, float] = field(default_factory=dict)
    decays: dict[str, float] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: Iterable[str], key: str) -> "Groups":
        """Parse "fc:rate=10", "fc:decay=0" and "conv1:frozen=true".

        Raises: InputError; a word has another form, or a value is set twice.
        """
        found: dict[str, list[str]] = {"rate": [], "decay": [], "frozen": []}
        for word in words:
            layer, _, assigned = (part.strip() for part in word.partition(":"))
            what, equals, value = (part.strip() for part in assigned.partition("="))
            if not layer or what not in found or not equals or not value or "=" in layer:
                told = f": {show(word)}: expected LAYER:rate=X, LAYER:decay=X or LAYER:frozen=true"
                raise InputError(Key(key), told)
            found[what].append(f"{layer}={value}")
        given = {what: assignments(pairs, key) for what, pairs in found.items()}
        for layer, value in given["frozen"].items():
            if value != "true":
                told = f": {layer}:frozen={show(value)}: expected true, or nothing of a trained layer"
                raise InputError(Key(key), told)
        rates, decays = given["rate"].items(), given["decay"].items()
        with about(Key(key)):
            return cls(
                {layer: read_number(value, Factor, f"{layer}:rate") for layer, value in rates},
                {layer: read_number(value, WeightDecay, f"{layer}:decay") for layer, value in decays},
                tuple(given["frozen"]),
            )

    def check_apart(self, rates: Mapping[str, float], their_key: str, key: str) -> None:
        """Raise `InputError` if another key sets the rate of the same layer."""
        for layer, rate in self.rates.items():
            for other, its in rates.items():
                if _words(other) == _words(layer):
                    told = (f": {layer}:rate={rate:g}, and ", Key(their_key), f" has {other}={its:g}")
                    raise InputError(Key(key), told, advice="give one")


def longest(values: Mapping[str, T], name: str, default: T) -> T:
    """Return the value of the longest matching layer."""
    fitting = [layer for layer in values if begins(layer, name)]
    return values[max(fitting, key=len)] if fitting else default


def begins(prefix: str, name: str) -> bool:
    """Whether a name begins with the words of a prefix."""
    words = _words(prefix)
    return _words(name)[: len(words)] == words


def assignments(pairs: Iterable[str], key: str, of: str = "LAYER") -> dict[str, str]:
    """Parse "layer4=0.1" and the like to a dict of values by layer.

    Args:
        key: names the values in messages.
        of: what the values belong to, for messages.

    Raises: InputError; a pair has another form, or a layer has two values.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        layer, equals, value = (part.strip() for part in pair.partition("="))
        if not layer or not equals or not value:
            raise InputError(Key(key), f": {show(pair)}: expected {of}=VALUE")
        if twice := [other for other in found if _words(other) == _words(layer)]:
            told = f": {show(layer)} has two values, {found[twice[0]]} and {value}"
            raise InputError(Key(key), told, advice="give one")
        found[layer] = value
    return found


def _words(name: str) -> list[str]:
    return _SEPARATOR.split(name)
