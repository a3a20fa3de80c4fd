"""`UnitedSource`: the examples of all processes as one source, if each process has data of its own.

With `data.placement=local`, a process opens only its own examples, and exchanges with the others what all must know:
the classes, the numbers of examples, and fingerprints. Images and labels are not exchanged.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError, Key, counted, show, some
from jaxddp.core.peers import Peers
from jaxddp.data.batch import Batch
from jaxddp.data.faults import check_distinct
from jaxddp.data.formats.array_files import in_order
from jaxddp.data.order import WHOLE, EvalOrder, Order, SampleOrder, Shard, UnitedOrder, most_in_batch
from jaxddp.data.source import VALIDATION, LabelForm, Source, Substitutes, image_dtype, labels_of

_log = logging.getLogger("jaxddp.experiment")


@dataclass(frozen=True, eq=False)
class UnitedSource:
    """The examples of all processes: first those of process 0, then those of process 1, and so on.

    Its batches have only the shard of this process, with examples of this process; see `UnitedOrder`.

    Attributes:
        own: the examples of this process.
        host: the number of this process.
        lengths: the number of examples of each process.
        class_ids, class_names: the classes of all processes.
        class_counts: the amounts of all processes; see `Labels.amounts`.
        digest: a digest of the fingerprints of all processes, in their order.
        new_labels: int32[k], the index in `class_ids` of each of the k classes of `own`.
    """

    own: Source
    host: int
    lengths: tuple[int, ...]
    class_ids: tuple[str, ...]
    class_names: tuple[str, ...]
    class_counts: np.ndarray
    digest: str
    new_labels: np.ndarray

    def __len__(self) -> int:
        return sum(self.lengths)

    def __repr__(self) -> str:
        whole = f"{counted(len(self), 'example')} on {self._processes}"
        return f"UnitedSource({whole}; process {self.host} has {self.own!r})"

    @property
    def _processes(self) -> str:
        return counted(len(self.lengths), "process")

    @property
    def num_classes(self) -> int:
        return len(self.class_ids)

    @cached_property
    def fingerprint(self) -> str:
        """The number of processes and the digest of their fingerprints."""
        return f"{self._processes}: {self.digest}"

    @property
    def labels(self) -> np.ndarray:
        """-1, int32[N], since labels are not exchanged; 0, [N, K], for other forms of labels.

        A batch has the labels of its examples.
        """
        if self.own.labels.ndim == 2:
            return np.broadcast_to(np.zeros((), self.own.labels.dtype), (len(self), self.num_classes))
        return np.broadcast_to(np.int32(-1), len(self))

    @property
    def label_form(self) -> LabelForm:
        return labels_of(self.own).form

    @property
    def weights(self) -> np.ndarray | None:
        """The weights of the examples of this process."""
        return getattr(self.own, "weights", None)

    @property
    def pixel_shape(self) -> tuple[int, int, int] | None:
        return self.own.pixel_shape

    def name(self, row: int) -> str:
        host = int(np.searchsorted(np.cumsum(self.lengths), row, side="right"))
        row -= sum(self.lengths[:host])
        return self.own.name(row) if host == self.host else f"example {row} of process {host}"

    def default_data(self) -> DataConfig:
        return self.own.default_data()

    def image_shape(self, data: DataConfig) -> tuple[int, int, int]:
        return self.own.image_shape(data)

    def image_dtype(self, data: DataConfig) -> np.dtype:
        return image_dtype(self.own, data)

    def check_evaluation(self, data: DataConfig) -> None:
        self.own.check_evaluation(data)

    def check_resident(self, data: DataConfig) -> None:
        self.own.check_resident(data)

    def substitutes(self, data: DataConfig) -> Substitutes | None:
        """Return the substitutes of this process: an image is replaced by one of the same process."""
        return self.own.substitutes(data)

    def order(self, batch_size: int, seed: int, unit: int, peers: Peers) -> UnitedOrder:
        """Return the training order. All processes must call this method together.

        Args:
            unit: the number of slots of a process is a multiple of this number.

        Raises: InputError if the batch is larger than the data set, or more than half of the slots would be padding.
        """
        SampleOrder(len(self), batch_size, seed)
        own = most_in_batch(self.lengths, self.host, batch_size)
        most = max(peers.exchange("examples in a batch", own))
        order = UnitedOrder(len(self), batch_size, seed, self.lengths, -(-most // unit) * unit)
        padding, largest = order.num_slots - batch_size, int(np.argmax(self.lengths))
        share = f"process {largest} has {self.lengths[largest]:,} of {counted(len(self), 'example')}"
        slots = f"{padding:,} of the {order.num_slots:,} slots of a batch"
        if padding > batch_size:
            advice = "distribute the examples more evenly over the processes, or raise the batch size"
            fault = f": {share}, so {slots} would be padding"
            raise InputError(Key.plain("data.placement", "local"), fault, advice=advice)
        if peers.is_first:
            padded = f"{slots} are padding ({padding / order.num_slots:.1%})"
            _log.info(f"data.placement=local: {self._processes}, {share}; {padded}")
        return order

    def train_batches(
        self, order: Order, data: DataConfig, steps: range, shard: Shard = WHOLE, substitutes: Substitutes | None = None
    ) -> Iterator[Batch]:
        assert isinstance(order, UnitedOrder) and shard[:2] == (self.host, len(self.lengths))
        own = order.of_host(self.host)
        batches = self.own.train_batches(own, data, steps, substitutes=substitutes)
        return (self._united(batch, own.mask(step)) for step, batch in zip(steps, batches, strict=True))

    def eval_batches(self, order: EvalOrder, data: DataConfig, shard: Shard = WHOLE) -> Iterator[Batch]:
        assert shard[:2] == (self.host, len(self.lengths))
        size = len(shard.of(order.rows(0)))
        number = max(-(-examples // size) for examples in self.lengths)
        batches = self.own.eval_batches(EvalOrder(len(self.own), size, number), data)
        return (self._united(batch, batch.mask) for batch in batches)

    def _united(self, batch: Batch, mask: np.ndarray) -> Batch:
        """Return a batch of this process with rows and labels of the union."""
        row = batch.row + np.int32(sum(self.lengths[: self.host]))
        label = _renumbered(batch.label, self.new_labels, self.num_classes)
        substituted = None if batch.substituted is None else batch.substituted * mask
        return batch._replace(label=label, mask=mask, row=row, substituted=substituted)


def own_part(source: Source) -> Source:
    """Return the examples of this process, whose labels are known here: the source itself if it is not united."""
    return source.own if isinstance(source, UnitedSource) else source


def class_counts(source: Source) -> np.ndarray:
    """Return the amount of each class on all processes; see `Labels.amounts`."""
    return source.class_counts if isinstance(source, UnitedSource) else labels_of(source).amounts


def warn_of_validation(source: Source, trained: Source, data: DataConfig) -> None:
    """Log warnings of classes without any training examples, and of crops below 2/3 of the short side of files."""
    if own_part(source).pixel_shape is None and 2 * data.resize > 3 * data.image_size:
        crop = f"evaluation crops the central {data.image_size} pixels of this short side"
        _log.warning(f"data.resize={data.resize}: {crop}; {data.image_size * 8 // 7} is usual")
    counts, trained_counts = class_counts(source), class_counts(trained)
    if len(unseen := np.flatnonzero((counts > 0) & (trained_counts == 0))):
        names = some([repr(source.class_names[label]) for label in unseen])
        shares = f"{counts[unseen].sum():,.0f} of {counted(len(source), 'example')}"
        _log.warning(f"{VALIDATION}: {shares} are of classes without any training examples: {names}")


def in_classes(source: Source, ids: tuple[str, ...], names: tuple[str, ...]) -> Source:
    """Return a labelled source with the classes of a network, among which all of its own are."""
    own = tuple(source.class_ids)
    if own == ids:
        return source
    places = np.array([ids.index(class_id) for class_id in own], np.int32)
    if isinstance(source, UnitedSource):
        counts = np.zeros(len(ids), source.class_counts.dtype)
        counts[places] = source.class_counts
        new_labels = places[source.new_labels]
        return replace(source, class_ids=ids, class_names=names, class_counts=counts, new_labels=new_labels)
    values = _renumbered(np.asarray(source.labels), places, len(ids))
    more: Any = {"labels": values, "class_names": names} | ({} if hasattr(source, "images") else {"class_ids": ids})
    return replace(cast(Any, source), **more)


def _renumbered(labels: np.ndarray, places: np.ndarray, num_classes: int) -> np.ndarray:
    """Return labels as indices of other classes; `places` has the new index of each class, int32[k]."""
    if labels.ndim == 1:
        return np.where(labels >= 0, places[labels], labels)
    values = np.zeros((len(labels), num_classes), labels.dtype)
    values[:, places] = labels
    return values


def unite(source: Source, data: DataConfig, peers: Peers, what: str) -> Source:
    """Return the union of the examples of all processes. All processes must call this function together.

    A process without others, and `data.placement=shared`, keep the source. So does validation data that are the same on
    all processes: they are divided among the processes, and each example counts once.

    Args:
        what: a name of the data for messages, such as "training data".

    Raises:
        InputError: the processes have images or labels of different kinds, or classes that cannot be put into one
            order.
        Unreachable: a process sends nothing in time.
    """
    if data.placement == "shared" or peers.is_alone or isinstance(source, UnitedSource):
        return source
    facts = {
        "image shape": source.image_shape(data),
        "image shape in evaluation": source.image_shape(data.of_evaluation),
        "dtype": image_dtype(source, data),
        "labels per image": labels_of(source).form,
        "weights": "none" if getattr(source, "weights", None) is None else "of each image",
        "form": "files" if source.pixel_shape is None else "arrays",
    }
    peers.agree({f"{fact} of the {what}": str(value) for fact, value in facts.items()})
    classes = [*zip(source.class_ids, source.class_names, strict=True)]
    counts = dict(zip(source.class_ids, labels_of(source).amounts.tolist(), strict=True))
    own = json.dumps([len(source), source.fingerprint, classes, counts])
    lengths, digest, twins, classes, counts = json.loads(peers.decide(f"the {what}", own, partial(_combined, what)))
    if len(twins) == peers.process_count and what == VALIDATION:
        return source
    if len(twins) > 1 and peers.is_first:
        fault = f"processes {twins[0]} and {twins[1]} have the same {what}, so each of these examples counts twice"
        _log.warning(f"data.placement=local: {fault}; if they read one folder, leave data.placement out")
    ids, names = zip(*classes, strict=True)
    new_labels = np.array([ids.index(class_id) for class_id in source.class_ids], np.int32)
    return UnitedSource(source, peers.process_index, tuple(lengths), ids, names, np.array(counts), digest, new_labels)


def _combined(what: str, texts: list[str]) -> str:
    """Return (lengths, digest of all fingerprints, processes with the same one, classes, their counts) as JSON.

    The classes are those of all processes, in the order of their ids unless all processes have the same.

    Raises: InputError if a process has another order, or another name for a class.
    """
    lengths, fingerprints, classes, counts = zip(*map(json.loads, texts), strict=True)
    digest = hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()
    most_common, _ = Counter(fingerprints).most_common(1)[0]
    twins = [process for process, fingerprint in enumerate(fingerprints) if fingerprint == most_common]
    totals = sum(map(Counter, counts), Counter[str]())
    merged = classes[0] if all(one == classes[0] for one in classes) else _merged(what, classes)
    return json.dumps([lengths, digest, twins, merged, [totals[class_id] for class_id, _ in merged]])


def _merged(what: str, classes: Sequence[list[list[str]]]) -> list[list[str]]:
    """Return (id, name) of all classes, in the order of ids: if possible, numbers by value. Raises: see `_combined`."""
    names: dict[str, str] = {}
    order = in_order if all([*dict(one)] == in_order(dict(one)) for one in classes) else sorted
    for process, of_process in enumerate(classes):
        if [*dict(of_process)] != order(dict(of_process)):
            fault = f"the processes have different classes, and those of process {process} are not in the order of ids"
            raise InputError(f"{what}: {fault}", advice="give all processes the same classes in the same order")
        for class_id, name in of_process:
            if (other := names.setdefault(class_id, name)) != name:
                both = f"{show(other)} on one process, and {show(name)} on process {process}"
                raise InputError(f"{what}: class {show(class_id)} is called {both}; give a class one name")
    check_distinct(names.values(), lambda name: f"{what} of different processes")
    return [[class_id, names[class_id]] for class_id in order(names)]
