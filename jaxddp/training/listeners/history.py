"""The metrics of a run in memory, for a notebook: as arrays, as a table, and as curves."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jaxddp.core.files as files
from jaxddp.config.values import checked
from jaxddp.core.errors import InputError, counted, figure, not_installed
from jaxddp.mesh import Topology
from jaxddp.training.events import PredictedImages, RunStart
from jaxddp.training.listeners.jsonl import METRICS, Columns, Row, RowListener, parse, series, table

if TYPE_CHECKING:
    from pandas import DataFrame

Part = Literal["train", "epochs", "val", "val_ema"]


class History(RowListener):
    """The metrics of a run: `history.train["loss"]`, `history.epochs["seconds"]`, `history.val["top1"]`.

    `history.val_ema` holds the metrics of averaged parameters. Each of these is a dict of arrays, which is empty if
    there are no rows; see `jaxddp.training.listeners.jsonl.Series`. A notebook shows a history as its curves. A
    resumed run continues the history after the restored step, with the earlier rows from the metrics.jsonl of its work
    directory; a run from step 0 starts with an empty history.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []

    @classmethod
    def read(cls, workdir: str | Path) -> "History":
        """Read the history from the metrics.jsonl of a work directory, whose run may still be training.

        Raises:
            InputError: there is no such file, it cannot be read, or a line is not a row of metrics.
        """
        files.check_path(workdir, "workdir")
        path = Path(workdir) / METRICS
        if not path.exists():
            raise InputError(f"{path}: no such file; give the work directory of a run that was logged")
        history = cls()
        history._rows = [row for _, row in parse(path)]
        return history

    @property
    def train(self) -> Columns:
        """The logged steps: an array for each column."""
        return series(self._rows).train

    @property
    def epochs(self) -> Columns:
        """The means of each epoch: an array for each column."""
        return series(self._rows).epochs

    @property
    def val(self) -> Columns:
        """The validations: an array for each column."""
        return series(self._rows).val

    @property
    def val_ema(self) -> Columns:
        """The validations of averaged parameters: an array for each column."""
        return series(self._rows).val_ema

    def to_frame(self, part: Part | None = None) -> "DataFrame":
        """Return the metrics as a pandas DataFrame, in the order in which they were logged.

        Without `part` it has all rows, with the columns of metrics.jsonl: `step` (int64), `epoch`, `split` ("train",
        "val", …), `loss`, …; the means of an epoch begin with `epoch_`. With a part it has the columns of `train`,
        `epochs`, `val` or `val_ema`. Numbers are float64, NaN where a row has no value.

        Raises:
            InputError: `part` is not one of these names, or pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise InputError(f"history.to_frame(): {not_installed('pandas', 'pandas')}") from None
        part = checked(part, Part | None, "part")
        return pd.DataFrame(table(self._rows) if part is None else getattr(self, part))

    def plot(self) -> Any:
        """Return the curves as a matplotlib Figure."""
        from jaxddp.training import pictures

        return pictures.figure(series(self._rows))

    def share(self, topology: Topology) -> None:
        """Copy the history of process 0, whose listeners are called, to all processes; all must call it together."""
        if topology.process_count > 1:
            self._rows = json.loads(topology.peers.from_first("history", lambda: json.dumps(self._rows)))

    def start(self, run: RunStart) -> None:
        if not self._rows and run.workdir is not None and (path := run.workdir / METRICS).exists():
            self._rows = [row for _, row in parse(path)]
        self._rows = [row for row in self._rows if row["step"] <= run.start_step] if run.start_step else []

    def log(self, row: Row, predictions: PredictedImages | None = None) -> None:
        self._rows.append(row)

    def __repr__(self) -> str:
        steps, epochs, val, _ = series(self._rows)
        columns = {"logged step": steps, "epoch": epochs, "evaluation": val}
        counts = ", ".join(counted(len(rows.get("step", ())), noun) for noun, rows in columns.items())
        last = [f"{name} {figure(name, val[name][-1])}" for name in ("loss", "top1") if name in val]
        return f"History({counts}{': val ' if last else ''}{', '.join(last)})"

    def _repr_png_(self) -> bytes | None:
        return self.plot()._repr_png_() if self._rows else None
