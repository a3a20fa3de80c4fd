"""Live progress in a terminal or in a notebook's cell, drawn with rich."""

import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

import jaxddp.core.phases as phases
from jaxddp.core.wording import duration
from jaxddp.training.events import EvaluationRecord, RunEnd, RunStart, StepRecord
from jaxddp.training.progress import lines

SECONDS_BETWEEN_FRAMES = 0.1
# The colours of the curves, which are distinct on light and dark backgrounds.
TRAIN, VAL, VAL_EMA = "#0072B2", "#D55E00", "#009E73"


class TerminalScreen:
    """A terminal. The picture is redrawn at the bottom, below the kept lines and the output of the program."""

    def __init__(self, stream: TextIO):
        # The caller has checked that this is a terminal; variables such as FORCE_COLOR must not change that.
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False)
        self._live: Live | None = None

    def draw(self, picture: Table) -> None:
        if self._live is None:
            is_stdout = self._console.file is sys.stdout
            # Each record redraws the picture, so rich needs no refresh thread, which could outlive an abrupt exit.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=is_stdout,
                redirect_stderr=is_stdout and sys.stderr.isatty(),
            )
            self._live.start()
        self._live.update(picture, refresh=True)

    def keep(self, line: str) -> None:
        self._console.print(_styled(line), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
        self._live = None


class NotebookScreen:
    """A notebook's cell. The picture is one display above the lines. Drawing needs IPython, but not ipywidgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, picture: Table) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)

    def keep(self, line: str) -> None:
        print(line)

    def close(self) -> None:
        self._handle = None


class LiveDisplay(lines.RunLines):
    """A progress bar with the time left. Below the bar are the last metrics, or the activity between steps.

    During an evaluation there is a second bar. The lines of epochs, and of evaluations between epochs, stay.
    """

    def __init__(self, screen: TerminalScreen | NotebookScreen):
        super().__init__(screen.keep)
        self._screen = screen
        self._training: tuple[RenderableType, ...] | None = None
        self._metrics = self._activity = ""
        self._last_frame = 0.0
        self._activity_reports = ExitStack()
        # The thread of `jaxddp.core.phases` draws the seconds of an activity, while the training thread waits.
        self._lock, self._is_over = threading.RLock(), False

    def start(self, run: RunStart) -> None:
        super().start(run)
        self._training = self._training_bar(run.start_step, run.start_step * run.batch_size / run.num_examples, None)
        self._metrics = "waiting for the first step"
        self._draw()
        self._activity_reports.enter_context(phases.reported_to(self._show_activity))

    def step(self, record: StepRecord) -> None:
        super().step(record)
        self._training = self._training_bar(record.step, record.epoch, self.remaining(record))
        self._metrics = f"{lines.format_metrics(record.metrics)}  {lines.pace(record)}"
        self._draw(at_once=record.epoch_end is not None)

    def evaluation(self, record: EvaluationRecord) -> None:
        super().evaluation(record)
        if record.final:
            self._draw(at_once=True)
        else:
            done = f"{record.seen:,}/{record.total:,}  {lines.format_metrics(record.metrics)}"
            self._draw((Text(record.split, VAL), _bar(record.seen, record.total, VAL), Text(done)))

    def end(self, run: RunEnd) -> None:
        self._activity_reports.close()
        with self._lock:
            self.flush()
            self._draw(at_once=True)
            self._is_over = True
            self._screen.close()
        super().end(run)

    def _show_activity(self, description: str) -> None:
        with self._lock:
            activity = phases.activity()
            details = activity.details() if description and activity.seconds >= 1 else ""
            self._activity = f"{description} ... {details}" if details else description
            if not self._is_over:
                self._draw(at_once=True)

    def _training_bar(self, step: int, epoch: float, remaining: float | None) -> tuple[RenderableType, ...]:
        total = self._run.total_steps
        text = Text(f"step {step:,}/{total:,}  {lines.position(self._run, epoch)}  ETA {duration(remaining)}")
        return Text("train", TRAIN), _bar(step, total, TRAIN), text

    def _draw(self, *bars: tuple[RenderableType, ...], at_once: bool = False) -> None:
        with self._lock:
            now = time.monotonic()
            if at_once or now - self._last_frame >= SECONDS_BETWEEN_FRAMES:
                self._last_frame = now
                self._screen.draw(self._picture(bars))

    def _picture(self, bars: Iterable[tuple[RenderableType, ...]]) -> Table:
        columns = Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True)
        grid = Table.grid(*columns, padding=(0, 1), expand=True)
        for bar in (self._training, *bars):
            if bar is not None:
                grid.add_row(*bar)
        picture = Table.grid(expand=True)
        picture.add_row(grid)
        picture.add_row(Text(self._activity or self._metrics, no_wrap=True, overflow="ellipsis"))
        return picture


def _bar(done: int, total: int, style: str) -> ProgressBar:
    return ProgressBar(total=max(total, 1), completed=done, complete_style=style, finished_style=style)


def _styled(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(r"\btrain\b", TRAIN)
    text.highlight_regex(r"\bval\b", VAL)
    text.highlight_regex(r"\bval_ema\b", VAL_EMA)
    text.highlight_regex(r"^epoch +\d+", "bold")
    return text
