"""Computes the outputs of a network for each image of a source once, in order, on all devices of all processes."""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.phases import doing
from jaxddp.core.wording import counted
from jaxddp.data.batch import Batch
from jaxddp.data.order import EvalOrder, Shard
from jaxddp.data.soundness import Omissions
from jaxddp.data.source import Source
from jaxddp.mesh import Topology

_MOST_AT_ONCE = 64
_AHEAD = 2


class BatchOutputs(NamedTuple):
    """The outputs for consecutive images, such as the probabilities of classes."""

    start: int
    """The row of the first image in the source."""
    values: Any
    """An array [n, …], or a tree of such arrays; floats are NaN for an image that cannot be used."""
    errors: dict[int, str]
    """The faults of unusable images, by their rows in the source."""

    def __repr__(self) -> str:
        return f"BatchOutputs({counted(self.size, 'image')} from row {self.start:,})"

    @property
    def size(self) -> int:
        """The number n of images."""
        return len(jax.tree.leaves(self.values)[0])


def images_at_once(num_examples: int) -> int:
    """Return the number of images per device in a batch, a power of two. It does not depend on the devices."""
    return min(_MOST_AT_ONCE, 1 << (num_examples - 1).bit_length())


@dataclass(frozen=True)
class OutputStream:
    """An iterable of the outputs of a network for a source, in batches.

    Attributes:
        program: a function of a batch on the devices that returns its outputs and its `substituted`, such as that of
            `jaxddp.engine.predictions.make_classify`.
        row: the shapes and dtypes of the outputs for one image.
        at_once: images per device. The images in the batch of a device, and their positions, depend on this number
            alone. So the outputs have the same bits on any number of devices.
    """

    program: Callable[[Any], tuple[Any, Any]]
    row: Any
    source: Source
    data: DataConfig
    topology: Topology
    at_once: int

    def __iter__(self) -> Iterator[BatchOutputs]:
        """Yield all outputs, in the order of the source. Raises: InputError if the processes' images differ."""
        self.topology.peers.agree({"the images": self.source.fingerprint, "images at once": str(self.at_once)})
        self.topology.connect()
        verified = getattr(self.source, "verified", None)
        if verified is None:
            yield from self._outputs(self._batches(None), None)
            return
        omissions = Omissions(len(self.source))
        batches: Iterator[Batch] = iter(())
        try:
            for row, fault in verified.check_files():
                omissions.refuse(row, str(InputError(f"{self.source.name(row)}: {fault}")))
            batches = self._batches(omissions)
            batches = itertools.chain([next(batches)], batches)
        except InputError:
            if not omissions.omits_all:
                raise
        # A process with only padding checks no image. It must not compute if the other processes stop.
        if str(True) in self.topology.peers.exchange("whether no image is left", str(omissions.omits_all)):
            yield self._none_usable(omissions)
        else:
            yield from self._outputs(batches, omissions)

    def _batches(self, omissions: Omissions | None) -> Iterator[Batch]:
        shard = Shard(self.topology.process_index, self.topology.process_count)
        options: dict[str, Any] = {} if omissions is None else {"omissions": omissions}
        return self.source.eval_batches(self._order, self.data, shard, **options)

    @property
    def _order(self) -> EvalOrder:
        return EvalOrder(len(self.source), self.at_once * self.topology.num_devices)

    def _outputs(self, batches: Iterable[Batch], omissions: Omissions | None) -> Iterator[BatchOutputs]:
        waiting: deque[tuple[int, Any, Any]] = deque()
        for step, batch in enumerate(batches):
            # The first call compiles the network.
            with nullcontext() if step else doing("compiling the network"):
                outputs = self.program(self.topology.place(batch))
            waiting.append((step * self._order.batch_size, *outputs))
            if len(waiting) > _AHEAD:
                yield self._finished(*waiting.popleft(), omissions)
        while waiting:
            yield self._finished(*waiting.popleft(), omissions)

    def _none_usable(self, omissions: Omissions) -> BatchOutputs:
        """Return the outputs for a source without usable images. Process 0 has the faults of all images."""
        faults = json.loads(
            self.topology.peers.from_first("faults of all images", lambda: json.dumps(omissions.faults))
        )

        def nothing(row: jax.ShapeDtypeStruct) -> np.ndarray:
            return np.broadcast_to(np.array(_unusable(row.dtype), row.dtype), (len(self.source), *row.shape))

        errors = dict(sorted((int(row), fault) for row, fault in faults.items()))
        return BatchOutputs(0, jax.tree.map(nothing, self.row), errors)

    def _finished(self, start: int, values: Any, replaced: Any, omissions: Omissions | None) -> BatchOutputs:
        """Return the computed outputs of a batch. An image whose `replaced` (float[B]) is not 0 has an error."""
        count = min(self._order.batch_size, len(self.source) - start)
        values, errors = jax.tree.map(lambda array: np.array(array[:count]), values), dict[int, str]()
        if omissions is not None and (bad := np.flatnonzero(np.asarray(replaced)[:count])).size:
            faults = {row: omissions.faults[row] for row in (start + bad).tolist() if row in omissions.faults}
            for of_process in self.topology.peers.exchange("images that cannot be used", json.dumps(faults)):
                errors |= {int(row): fault for row, fault in json.loads(of_process).items()}
            for array in jax.tree.leaves(values):
                array[bad] = _unusable(array.dtype)
        return BatchOutputs(start, values, dict(sorted(errors.items())))


def _unusable(dtype: np.dtype) -> float:
    """Return the output for an image that cannot be used."""
    return np.nan if np.issubdtype(dtype, np.floating) else 0
