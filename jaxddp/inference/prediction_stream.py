"""What a network says of each image of a source, once and in order, on all devices of all processes."""

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxddp.config import DataConfig
from jaxddp.core.errors import InputError
from jaxddp.core.phases import doing
from jaxddp.core.wording import counted
from jaxddp.data.batch import Batch
from jaxddp.data.order import EvalOrder, Shard
from jaxddp.data.soundness.bad_images import Omissions
from jaxddp.data.source import Source
from jaxddp.mesh import Topology

_MOST_AT_ONCE = 64
_AHEAD = 2


class BatchPredictions(NamedTuple):
    """Those of consecutive images."""

    start: int
    """The row of the first."""
    probabilities: np.ndarray
    """float32[n, K]; NaN in the row of an image that cannot be used."""
    errors: dict[int, str]
    """Why an image cannot be used, by its row in the source."""

    def __repr__(self) -> str:
        return f"BatchPredictions({counted(len(self.probabilities), 'image')} from row {self.start:,})"


def images_at_once(num_examples: int) -> int:
    """How many images each device classifies at once: as many on any number of devices, a power of two."""
    return min(_MOST_AT_ONCE, 1 << (num_examples - 1).bit_length())


@dataclass(frozen=True)
class PredictionStream:
    """A source and what classifies it.

    Attributes:
        classify: `jaxddp.engine.step.make_classify`'s, of a placed batch.
        at_once: images on each device. Which images share a device's batch, and their places in it, follow from this
            number alone, so the answers have the same bits on any number of devices.
    """

    classify: Callable[[Any], tuple[Any, Any]]
    source: Source
    data: DataConfig
    topology: Topology
    num_classes: int
    at_once: int

    def __iter__(self) -> Iterator[BatchPredictions]:
        """All answers, in the order of the source. Raises: InputError; the processes ask about different images."""
        self.topology.peers.agree({"the images": self.source.fingerprint, "images at once": str(self.at_once)})
        self.topology.connect()
        verified = getattr(self.source, "verified", None)
        if verified is None:
            yield from self._answers(self._batches(None), None)
            return
        omissions = Omissions(len(self.source))
        batches: Iterator[Batch] = iter(())
        try:
            for row, fault in verified.look():
                omissions.refuse(row, f"{self.source.name(row)}: {fault}")
            batches = self._batches(omissions)
            batches = itertools.chain([next(batches)], batches)
        except InputError:
            if not omissions.all:
                raise
        # A process whose part is padding alone has not looked, and must not compute by itself.
        if str(True) in self.topology.peers.exchange("whether no image is left", str(omissions.all)):
            yield self._nothing(omissions)
        else:
            yield from self._answers(batches, omissions)

    def _batches(self, omissions: Omissions | None) -> Iterator[Batch]:
        shard = Shard(self.topology.process_index, self.topology.process_count)
        given: dict[str, Any] = {} if omissions is None else {"omissions": omissions}
        return self.source.eval_batches(self._order, self.data, shard, **given)

    @property
    def _order(self) -> EvalOrder:
        return EvalOrder(len(self.source), self.at_once * self.topology.num_devices)

    def _answers(self, batches: Iterable[Batch], omissions: Omissions | None) -> Iterator[BatchPredictions]:
        waiting: deque[tuple[int, Any, Any]] = deque()
        for step, batch in enumerate(batches):
            # The first one compiles.
            with doing("" if step else "compiling the network"):
                found = self.classify(self.topology.place(batch))
            waiting.append((step * self._order.batch_size, *found))
            if len(waiting) > _AHEAD:
                yield self._answer(*waiting.popleft(), omissions)
        while waiting:
            yield self._answer(*waiting.popleft(), omissions)

    def _nothing(self, omissions: Omissions) -> BatchPredictions:
        """The answers where no image can be used, which the first process has found."""
        told = self.topology.peers.from_first("faults of all images", lambda: json.dumps(omissions.faults))
        faults = json.loads(told)
        nothing = np.full((len(self.source), self.num_classes), np.nan, np.float32)
        return BatchPredictions(0, nothing, dict(sorted((int(row), fault) for row, fault in faults.items())))

    def _answer(self, start: int, probabilities: Any, replaced: Any, omissions: Omissions | None) -> BatchPredictions:
        """The answers of one batch, waited for: the images that were `replaced` by others, float[B], have errors."""
        count = min(len(probabilities), len(self.source) - start)
        found, errors = np.array(probabilities[:count]), dict[int, str]()
        if omissions is not None and (bad := np.flatnonzero(np.asarray(replaced)[:count])).size:
            own = {row: omissions.faults[row] for row in (start + bad).tolist() if row in omissions.faults}
            for others in self.topology.peers.exchange("images that cannot be used", json.dumps(own)):
                errors |= {int(row): fault for row, fault in json.loads(others).items()}
            found[bad] = np.nan
        return BatchPredictions(start, found, dict(sorted(errors.items())))
