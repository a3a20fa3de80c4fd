"""A run's metrics in memory, for a notebook: arrays to compute with, and a picture."""

from typing import Any

from jaxddp.training import rows
from jaxddp.training.events import EvaluationRecord, Listener, RunStart, StepRecord


class History(Listener):
    """Collects the metrics of a run: `history.train["loss"]`, `history.epochs["seconds"]`, `history.val["top1"]`.

    Each is a dict of arrays, empty where there is nothing; see `rows.Series`. A notebook shows a history as its curves.
    A run that resumes continues it after the restored step; a run from step 0 begins it anew.
    """

    def __init__(self) -> None:
        self._rows: list[rows.Row] = []

    @property
    def train(self) -> rows.Columns:
        return rows.series(self._rows).train

    @property
    def epochs(self) -> rows.Columns:
        return rows.series(self._rows).epochs

    @property
    def val(self) -> rows.Columns:
        return rows.series(self._rows).val

    def plot(self) -> Any:
        """The curves as a matplotlib Figure. Needs matplotlib."""
        from jaxddp.training import pictures

        return pictures.figure(rows.series(self._rows))

    def start(self, run: RunStart) -> None:
        self._rows = [row for row in self._rows if row["step"] <= run.start_step] if run.start_step else []

    def step(self, record: StepRecord) -> None:
        self._rows.append(rows.step_row(record))

    def evaluation(self, record: EvaluationRecord) -> None:
        if record.final:
            self._rows.append(rows.evaluation_row(record))

    def __repr__(self) -> str:
        steps, epochs, val = rows.series(self._rows)
        counts = f"{len(steps.get('step', ()))} logged steps, {len(epochs.get('step', ()))} epochs"
        last = [f"{name} {val[name][-1]:.4g}" for name in ("loss", "top1") if name in val]
        return f"History({counts}, {len(val.get('step', ()))} evaluations{': val ' if last else ''}{', '.join(last)})"

    def _repr_png_(self) -> bytes | None:
        return self.plot()._repr_png_() if self._rows else None
