"""Labels, and the two protocols of data: a `Source` yields batches; a `Table` also selects examples and reads images.

Training and evaluation accept any object with the members of `Source`. Code that opens a data set
(`jaxddp.data.format`), checks it or selects from it needs a `Table`.
"""

import logging
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, counted, nearest, refused, show, some
from jaxddp.data.batch import Batch
from jaxddp.data.order import WHOLE, EvalOrder, Order, Shard

ClassSelection = str | Iterable[int | str] | None
"""`"0:200"` (start and stop, as in Python), `"n01440764,n01443537"`, a sequence of indices or ids, or None for all."""
_RANGE = re.compile(r"\s*(-?[0-9]{1,9})\s*:\s*(-?[0-9]{1,9})\s*")
_FORMS = "give a range such as '0:200', or class ids such as 'n01440764,n01443537'"
_TAKE_KEY = 0x7A6B65
_log = logging.getLogger("jaxddp.data")
LabelForm = Literal["one label", "several labels", "shares", "numbers"]
"""The form of the labels of N examples of K classes: one label, int32[N]; several labels or none, multi-hot,
uint8[N, K]; shares of the classes that add up to 1, float32[N, K]; or K numbers to predict, float32[N, K]."""

FLOATS = {"shares": "finite numbers of 0 or more that are not all 0", "numbers": "finite numbers, like 0.5"}
"""The values that labels of each form of floats must have."""


class LabelKind(NamedTuple):
    """The kind of labels, for losses and metrics: the number of classes, and the form of the labels."""

    num_classes: int
    form: LabelForm = "one label"


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of N examples of K classes.

    Attributes:
        values: int32[N], class indices 0..K-1; -1 if the class is unknown. See `LabelForm` for other forms.
        ids: the ids of the K classes, by which data sets are compared, or the names of K numbers.
        names: the readable names of the K classes.
        form: the form of the values.
    """

    values: np.ndarray
    ids: tuple[str, ...]
    names: tuple[str, ...]
    form: LabelForm = "one label"

    @property
    def kind(self) -> LabelKind:
        return LabelKind(len(self.ids), self.form)

    @property
    def has_rows(self) -> bool:
        """Whether the label of an example is a row of K values."""
        return self.values.ndim == 2

    @property
    def counts(self) -> np.ndarray:
        """The number of examples of each class, int64[K]; an example of several classes counts once in each.

        For numbers, it is the number of examples.
        """
        if self.has_rows:
            return ((self.values > 0) | (self.form == "numbers")).sum(0, dtype=np.int64)
        return np.bincount(self.values[self.values >= 0], minlength=len(self.ids))

    @property
    def amounts(self) -> np.ndarray:
        """The numbers of `counts`, or for shares their sums, float64[K]."""
        return self.values.sum(0, dtype=np.float64) if self.form == "shares" else self.counts

    @property
    def single(self) -> np.ndarray:
        """int32[N], the class of each example that has exactly one class; -1 for all other examples."""
        if not self.has_rows:
            return self.values
        is_single = ((self.values > 0).sum(1) == 1) & (self.form != "numbers")
        return np.where(is_single, self.values.argmax(1), -1).astype(np.int32)

    @property
    def codes(self) -> np.ndarray:
        """int[N], the class index of each example; for labels of other forms, equal for equal labels."""
        return np.unique(self.values, axis=0, return_inverse=True)[1].reshape(-1) if self.has_rows else self.values

    def of(self, row: int) -> np.ndarray:
        """Return the classes of a row, int64[n], ascending; empty if the class is unknown."""
        return np.flatnonzero(self.values[row] if self.has_rows else np.arange(len(self.ids)) == self.values[row])

    def text(self, row: int) -> str:
        """Return the ids of the classes of a row, or its shares or numbers, separated by ";"."""
        if self.form in FLOATS:
            return ";".join(str(value) for value in self.values[row])
        return ";".join(self.ids[label] for label in self.of(row))

    def share(self, limit: int) -> np.ndarray:
        """Return the rows of at most `limit` examples, int64[n], in proportion to the classes; see `balanced_rows`."""
        return balanced_rows(self.codes, limit)

    def select(self, classes: str | Iterable[int | str], first: str) -> "tuple[np.ndarray, Labels]":
        """Select the examples of some classes.

        Args:
            first: a readable name of the first example, for messages.

        Returns:
            The rows of the examples of these classes, int64[n], ascending; and the labels of these rows, with indices
            0..k-1 in the order of `ids`.

        Raises:
            InputError: `chosen_classes` rejects the classes, no example is of these classes, or the labels are shares
                or numbers.
        """
        if self.form in FLOATS:
            raise InputError(f"classes {show(classes)}: the labels are {self.form}; select all, or rows of the table")
        chosen = chosen_classes(classes, self.ids)
        if self.has_rows:
            values = self.values[:, chosen]
            rows = np.flatnonzero(values.any(1))
        else:
            values = np.searchsorted(chosen, self.values).astype(np.int32)
            rows = np.flatnonzero(np.isin(self.values, chosen))
        if not len(rows):
            examples = f"({counted(len(self.values), 'example')}, the first is {first})"
            fault = f"no example has one of the {len(chosen)} selected classes {examples}; select other classes"
            raise InputError(f"classes {show(classes)}: {fault}")
        ids, names = (tuple(all_of[label] for label in chosen) for all_of in (self.ids, self.names))
        return rows, Labels(values[rows], ids, names, self.form)


def chosen_classes(classes: str | Iterable[int | str], class_ids: Sequence[str]) -> np.ndarray:
    """Return the indices of the chosen classes, int64[K], in ascending order.

    Raises:
        InputError: a class id is unknown, an index is out of bounds, a class is chosen twice, or no class is chosen.
    """
    where, count, items = f"classes {show(classes)}", len(class_ids), classes
    position = {class_id: index for index, class_id in enumerate(class_ids)}
    if isinstance(classes, str):
        span = _RANGE.fullmatch(classes)
        items = range(int(span[1]), int(span[2])) if span else filter(None, map(str.strip, classes.split(",")))
    elif not isinstance(classes, Iterable):
        raise InputError(f"{where}: is of type {type(classes).__name__}; {_FORMS}")
    chosen: set[int] = set()
    for item in items:
        try:
            index = position.get(item, -1) if isinstance(item, str) else operator.index(item)
        except TypeError:
            raise InputError(f"{where}: {show(item)} is neither an index nor a class id; {_FORMS}") from None
        # The first index that is wrong ends a range of a billion classes.
        if not 0 <= index < count:
            fault = f"out of bounds, there are {count} classes; stay within 0:{count}"
            if isinstance(item, str):
                fault = f"unknown class {show(item)} of {count}{nearest(item, position) or f'; {_FORMS}'}"
            raise InputError(f"{where}: {fault}")
        if index in chosen:
            raise InputError(f"{where}: names {class_ids[index]} twice; name each class once")
        chosen.add(index)
    if not chosen:
        raise InputError(f"{where}: selects no class; {_FORMS}")
    return np.array(sorted(chosen), np.int64)


def balanced_rows(label: np.ndarray, limit: int) -> np.ndarray:
    """Return `limit` of N rows, int64, ascending, in proportion to the classes; all rows if N is at most `limit`.

    The choice depends only on the labels and the limit. The rows of a smaller limit are a subset of those of a larger
    limit. The m rows of a class, in a fixed pseudo-random order, get the ranks 1/2m, 3/2m, 5/2m, ...; the rows with the
    smallest ranks are chosen (Webster's method of apportionment).

    Raises: InputError if the limit is below 1.
    """
    if limit < 1:
        raise InputError(f"limit {limit}: selects no example; give a limit of 1 or more")
    if limit >= len(label):
        return np.arange(len(label))
    # The raw words of a counter-based generator are fixed; NumPy's permutations may change from release to release.
    word = np.random.Philox(key=_TAKE_KEY).random_raw(len(label))
    by_class = np.lexsort((word, label))
    _, start, count = np.unique(label[by_class], return_index=True, return_counts=True)
    rank = np.arange(len(label)) - np.repeat(start, count)
    place = (rank + 0.5) / np.repeat(count, count)
    return np.sort(by_class[np.lexsort((word[by_class], place))[:limit]])


class Record(NamedTuple):
    """The identification of one example, with values that JSON can represent."""

    id: str | int
    """The id of the example; its row number if it has no id."""
    path: str | None = None
    """The file in the data set that holds the image; None if the image is in memory."""
    offset: int | None = None
    """The position of the image's record in the file `path`; None if the whole file is the image."""


def float_labels(values: np.ndarray, form: str) -> np.ndarray:
    """Return shares, divided by their sum, or numbers, as float32[N, K]."""
    values = np.asarray(values, np.float64)
    return (values / values.sum(1, keepdims=True) if form == "shares" else values).astype(np.float32)


Split = Literal["train", "val"]
"""The splits of a data set: training and validation."""


class Substitutes:
    """Substitutes for unusable images: each is replaced by the next usable image of the same class or set of classes.

    Each host finds unusable images only among the images that it reads. If a substitute is unusable too, the host takes
    the next image, so all hosts arrive at the same substitute.

    Args:
        name: returns a readable name of a row, with which each substitute is logged; None to log nothing.

    Attributes:
        faults: a dict from each unusable row to a message.
    """

    def __init__(self, labels: Labels, name: Callable[[int], str] | None = None):
        self.faults: dict[int, str] = {}
        self._labels, self._name, self._codes = labels, name, labels.codes
        self._is_usable = np.ones(len(self._codes), bool)

    def resolve(self, rows: np.ndarray) -> np.ndarray:
        """Return int[n] rows with each unusable row replaced by the next usable row of its class, if there is one."""
        resolved = rows.copy()
        for at in np.flatnonzero(~self._is_usable[rows]):
            usable = np.flatnonzero((self._codes == self._codes[rows[at]]) & self._is_usable)
            if len(usable):
                resolved[at] = usable[np.searchsorted(usable, rows[at]) % len(usable)]
        return resolved

    def refuse(self, row: int, fault: str) -> None:
        """Mark a row as unusable, and log its fault and substitute. Raises: InputError if there is no substitute."""
        self.faults[row], self._is_usable[row] = fault, False
        substitute = int(self.resolve(np.array([row]))[0])
        if substitute == row:
            text = self._labels.text(row)
            raise InputError(f"{fault}; and no image{text and f' with the label {text}'} is left that can be used")
        if self._name is not None:
            _log.warning("%s; its substitute is %s", fault, self._name(substitute))


class Source(Protocol):
    """N examples of K classes that can be iterated in batches for training and evaluation.

    A batch has NumPy arrays with the shard of one process; see `Batch`. `jaxddp.data.order` makes all fields except
    the images. The methods that return iterators check their arguments immediately. Work in the background ends when
    the iterator is closed or deleted. Pixels are uint8; a source with another dtype also has a method
    `image_dtype(data)`, which returns it.
    """

    def default_data(self) -> DataConfig:
        """Return the default config for these images."""
        ...

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        """Return (H, W, C) of the images in training batches.

        For evaluation, pass `data.of_evaluation`. A run with growing images changes `data.image_size`. If the returned
        shape does not depend on `data.image_size`, the training step resizes the images on the device.
        """
        ...

    def check_evaluation(self, data: DataConfig) -> None:
        """Check that the evaluation settings of the config are valid for these images.

        Raises:
            InputError: a setting is invalid. The message names the key, or the first unusable image.
        """
        ...

    def check_resident(self, data: DataConfig) -> None:
        """Check that the pixels are the same in every epoch, so they can be cached on the devices (`data.cache`)."""
        ...

    def substitutes(self, data: DataConfig) -> Substitutes | None:
        """Return the substitutes for unusable images; None if an unusable image is an error or cannot occur."""
        ...

    def train_batches(
        self, order: Order, data: DataConfig, steps: range, shard: Shard = WHOLE, substitutes: Substitutes | None = None
    ) -> Iterator[Batch]:
        """Yield the training batches of the given steps; batches of an `EvalOrder` are padded as in `eval_batches`.

        Images of other steps are not read. Random crops depend only on (seed, epoch, row).

        Raises:
            InputError: the order is for another number of examples, its batch size is not divisible by `shard.count`,
                the config is out of range, or, while iterating, an image is unusable.
        """
        ...

    def eval_batches(self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE) -> Iterator[Batch]:
        """Yield batches with every example once. In padding, mask and image are 0.

        If a table has files to verify (`verified`), its method has an additional argument `omissions`; see
        `ExampleTable.eval_batches`.

        Raises: see `train_batches`.
        """
        ...

    # An attribute and not a property, because type checkers do not accept a `cached_property` in place of a property.
    fingerprint: Any
    """A string that differs between two data sets if an example or a class differs."""

    @property
    def labels(self) -> np.ndarray:
        """int32[N], the class index of each example, 0..K-1; -1 if the class is unknown. See `LabelForm` for others.

        If the labels are float32[N, K], examples may have an attribute `label_form`, "shares" or "numbers" (default).
        """
        ...

    @property
    def class_ids(self) -> tuple[str, ...]:
        """The ids of the K classes, by which data sets are compared. The id of a class without an id is its name."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """K readable names."""
        ...

    @property
    def num_classes(self) -> int:
        """The number K of classes."""
        ...

    def __len__(self) -> int: ...

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        """(H, W, C) of each image if images are stored as pixels; None if they are encoded files."""
        ...

    def name(self, row: int) -> str:
        """Return a readable name of a row's image, such as its path."""
        ...


class Table(Source, Protocol):
    """A source with methods to select examples, and to read single images. Every data set format returns one."""

    verified: Any
    """`Verified`: the images that this run or an earlier one verified; None if there are no files to verify."""

    def select(self, classes: ClassSelection) -> Self:
        """Return the examples of some classes, in the order of the rows; all examples for None.

        The selected classes are numbered from 0 in the order of `class_ids`, independently of the order in `classes`.

        Raises:
            InputError: a class is unknown, or no example is left.
        """
        ...

    def take(self, limit: int) -> Self:
        """Return at most `limit` examples (1 or more), in proportion to the classes; see `balanced_rows`."""
        ...

    def rows(self, rows: np.ndarray) -> Self:
        """Return the examples of int[n] rows, in that order."""
        ...

    def without_labels(self) -> Self:
        """Return the same images without classes; every label is -1."""
        ...

    def check(self, data: DataConfig) -> None:
        """Check that every image exists, and that the config's size and crops are valid for it. No image is opened.

        Raises:
            InputError: an image is missing, or a setting is invalid. The message names the first image, or the key.
        """
        ...

    def read(self, row: int) -> bytes:
        """Return a row's image as it is stored: an encoded file, or pixels of `image_dtype`.

        Raises:
            InputError: the image is missing or cannot be read. The message names the image.
            Unreachable: a remote store did not answer within its deadline.
        """
        ...

    def record(self, row: int) -> Record:
        """Return the record that identifies a row in a manifest."""
        ...


Splits = dict[str, Table]
"""The splits of a data set by name, such as "train" and "val"."""
VALIDATION = "validation data"
"""The name of the validation data in messages."""

# The members that `check_source` requires. `fingerprint` is an annotation of the protocol, so `vars` omits it. This is
# intended, because `hasattr` would compute the fingerprint, which may take long.
_MEMBERS = [name for name in vars(Source) if not name.startswith("_")]


def check_source(source: Any, name: str) -> Source:
    """Return `source`. Raise `InputError` if it lacks a member of `Source`; the message calls it `name`."""
    missing = [member for member in _MEMBERS if not hasattr(source, member)]
    if missing or isinstance(source, type):
        advice = "give a table of open_data(PATH), an ArrayTable(images, labels, class_names) or another source"
        if missing and missing != _MEMBERS and not isinstance(source, type):
            advice = f"it has no {missing[0]}, which a source has; see jaxddp.data.source.Source"
        raise refused(name, source, advice)
    return source


def id_of(examples: Source, row: int) -> str:
    """Return the id of a row from its record; the row number if the examples have no records."""
    return str(getattr(examples, "record", Record)(row).id)


def labels_of(examples: Source) -> Labels:
    """Return the labels of examples, with the ids and names of the classes."""
    values = examples.labels
    form: LabelForm = "one label" if values.ndim == 1 else "several labels"
    if np.issubdtype(values.dtype, np.floating):
        form = getattr(examples, "label_form", None) or "numbers"
    return Labels(values, tuple(examples.class_ids), tuple(examples.class_names), form)


def one_line_repr(examples: Source, images: str) -> str:
    """Return a one-line `repr` of examples: their number, their classes, and `images`, a description of the images."""
    names = f" ({some(examples.class_names)})" if examples.num_classes else ""
    noun = "number" if labels_of(examples).form == "numbers" else "class"
    classes = f"{counted(examples.num_classes, noun)}{names}"
    return f"{type(examples).__name__}({counted(len(examples), 'example')} of {classes}, {images})"


def check_labelled(source: Source, what: str) -> None:
    """Check that every label is known.

    Args:
        what: a name of the data for messages, such as "training data".

    Raises:
        InputError: a label is unknown or not below the number of classes. The message names the first such image.
    """
    labels = labels_of(source)
    if labels.has_rows:
        return
    if len(beyond := np.flatnonzero(labels.values >= source.num_classes)):
        fault = f"label {labels.values[beyond[0]]} of {counted(source.num_classes, 'class')}"
        raise InputError(f"{what}: {source.name(int(beyond[0]))} has {fault}; number the classes from 0")
    if len(unknown := np.flatnonzero(labels.values < 0)):
        fault = f"no label ({len(unknown)} of {counted(len(source), 'image')} have none)"
        advice = "give data with labels, or predict their classes instead"
        raise InputError(f"{what}: {source.name(int(unknown[0]))} has {fault}; {advice}")


def check_one_label(labels: LabelKind | Labels, key: Key) -> None:
    """Raise `InputError` about a key for training with one label per image, if images have other labels."""
    if labels.form != "one label":
        raise InputError(key, f" takes one label per image, but the training data have {labels.form}")


def image_dtype(source: Source, data: DataConfig) -> np.dtype:
    """Return the dtype of the pixels of a source: the result of its method `image_dtype`, or uint8 without one."""
    method = getattr(source, "image_dtype", None)
    return np.dtype(np.uint8) if method is None else method(data)


def check_comparable(source: Source, trained: Source, data: DataConfig) -> None:
    """Check that a source has images and classes like the training data. Raises: InputError."""
    both, same_classes = (source, trained), "select the same classes in both"
    _check_equal(VALIDATION, "{} classes", (len(each.class_ids) for each in both), same_classes)
    for label, ids in enumerate(zip(source.class_ids, trained.class_ids, strict=True)):
        _check_equal(VALIDATION, f"class {label} is {{!r}}", ids, same_classes)
    forms = (labels_of(each).form for each in both)
    _check_equal(VALIDATION, "{} per image", forms, "give both the same form of labels")
    data = data.of_evaluation
    check_pixels(source, trained, data, VALIDATION)
    source.check_evaluation(data)


def check_pixels(source: Source, trained: Source, data: DataConfig, what: str) -> None:
    """Check that a source has images like the training data; `what` names it in messages. Raises: InputError."""
    both = (source, trained)
    _check_equal(what, "images of {}", (each.image_shape(data) for each in both), "give both the same shape")
    _check_equal(what, "pixels of {}", (image_dtype(each, data) for each in both), "give both the same dtype")


def _check_equal(what: str, problem: str, values: Iterable[Any], advice: str) -> None:
    found, trained = map(problem.format, values)
    if found != trained:
        raise InputError(f"{what}: {found}, and {trained} in the training data", advice=advice)
