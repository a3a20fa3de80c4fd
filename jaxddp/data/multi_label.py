"""Tables of files whose examples may be of several classes each, as they are trained on: labels are multi-hot rows."""

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, cast

import numpy as np

from jaxddp.data.batch import Batch
from jaxddp.data.order import WHOLE, EvalOrder, Shard
from jaxddp.data.source import Source
from jaxddp.data.subset import ClassSelection, balanced_rows, label_codes
from jaxddp.data.substitutes import Substitutes
from jaxddp.data.table import ExampleTable


class MultiLabelTable:
    """An `ExampleTable` with labels uint8[N, K], 1 where the example is of the class; all else is the table's."""

    def __init__(self, table: ExampleTable):
        self._table = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._table, name)

    def __len__(self) -> int:
        return len(self._table)

    def __repr__(self) -> str:
        return f"MultiLabelTable({self._table!r})"

    @cached_property
    def labels(self) -> np.ndarray:
        """N times K bytes."""
        table = self._table
        hot = np.zeros((len(table), table.num_classes), np.uint8)
        if table.label_sets is None:
            known = np.flatnonzero(table.labels >= 0)
            hot[known, table.labels[known]] = 1
        else:
            for row, members in enumerate(table.label_sets.members):
                hot[row, list(members)] = 1
        return hot

    def select(self, classes: ClassSelection) -> "MultiLabelTable":
        return MultiLabelTable(self._table.select(classes))

    def take(self, limit: int) -> "MultiLabelTable":
        return MultiLabelTable(self._table.rows(balanced_rows(label_codes(self.labels), limit)))

    def substitutes(self, data: Any) -> Substitutes | None:
        return None if data.bad_images == "fail" else Substitutes(cast(Source, self))

    def train_batches(self, *arguments: Any, **more: Any) -> Iterator[Batch]:
        return map(self._labelled, self._table.train_batches(*arguments, **more))

    def eval_batches(self, order: EvalOrder, data: Any, shard: Shard = WHOLE, **more: Any) -> Iterator[Batch]:
        return map(self._labelled, self._table.eval_batches(order, data, shard, **more))

    def _labelled(self, batch: Batch) -> Batch:
        return batch._replace(label=np.where(batch.mask[:, None] > 0, self.labels[batch.row], np.uint8(0)))


def with_several_labels(splits: Mapping[str, Source]) -> dict[str, Source]:
    """The splits of a data set as they are trained on: with multi-hot labels where any of its examples has several."""
    several = any(getattr(source, "label_sets", None) is not None for source in splits.values())
    wrap = several and all(isinstance(source, ExampleTable) for source in splits.values())
    return {split: cast(Source, MultiLabelTable(cast(Any, each))) if wrap else each for split, each in splits.items()}
