"""The lines of text about a run's progress, and the choice of the display: live with rich, or plain lines."""

import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jaxddp.core.phases as phases
from jaxddp.config.goal import VAL, VAL_EMA
from jaxddp.core.cores import num_cores
from jaxddp.core.duration import Duration
from jaxddp.core.errors import counted, duration, measure, on_screen, plural, size, some, speed
from jaxddp.core.log import say
from jaxddp.training.events import EvaluationRecord, Listener, RunEnd, RunStart, StepRecord, Usage, short_class_name

SECONDS_BETWEEN_FRAMES = 0.1
_WAITED_SECONDS, _WAITED_SHARE = 10.0, 0.3
"""The least time in seconds, and the least share of the training time, of waits of which the cause is said."""
_LONG_SECONDS, _DAY_SECONDS = 60.0, 20 * 3600.0
"""The time left in seconds from which on it is said early, and from which on the day is said, too."""
_BUSY = 0.8
"""The used share of the cores' time from which on more work for them takes longer."""
COLOURS = {"train": "#0072B2", VAL: "#D55E00", VAL_EMA: "#009E73"}
"""The colour of each split: Okabe and Ito's blue, vermilion and green (https://jfly.uni-koeln.de/color/), which are
distinct for all kinds of colour vision, and on light and dark backgrounds."""
_STYLES = {**COLOURS, r"^epoch +\d+": "bold"}
"""The styles of words in the lines that stay on a terminal."""


def progress(stream: TextIO | None = None) -> Listener:
    """Return a live display in a terminal or a notebook if rich is installed, and plain lines otherwise.

    Without a standard output, as in a daemon, nothing is displayed.
    """
    output = stream or sys.stdout
    if output is None:
        return Listener()
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        return PlainLines(output)
    if output.isatty() and os.environ.get("TERM") not in (None, "", "dumb"):
        return LiveDisplay(TerminalScreen(output))
    return LiveDisplay(NotebookScreen()) if output is sys.stdout and Console().is_jupyter else PlainLines(output)


def opening(run: RunStart) -> list[str]:
    """Return the first lines: the data, the validation data, the network, and the length and place of the run."""
    devices = f"{run.devices} x {run.device_kind}" + (f" in {run.processes} processes" if run.processes > 1 else "")
    epochs, said, names = total_epochs(run), run.description, [*map(short_class_name, run.class_names)]
    classes = f" of {counted(len(names), 'class')} ({some(names)})" if names else ""
    data = [counted(run.num_examples, "example") + classes, said.data]
    validation = [counted(run.num_validation, "example"), said.validation] if run.num_validation else []
    network = [said.network, counted(count_parameters(run.params), "parameter")]
    length = [f"{counted(run.total_steps, 'step')} ({_epochs(epochs)} {plural(epochs, 'epoch')})"]
    length += [f"global batch {run.batch_size:,} on {devices}"]
    length += [f"resuming at step {run.start_step:,}"] if run.start_step else []
    length += [f"writing to {run.workdir}"] if run.workdir else []
    if run.traced is not None:
        nothing = "no step left to trace (the first step compiles and is not traced)"
        length.append(f"tracing steps {run.traced[0]:,} to {run.traced[-1]:,}" if run.traced else nothing)
    lines = {"data": data, "validation": validation, "network": network, "training": length}
    return [on_screen(f"{name}: {' | '.join(filter(None, parts))}") for name, parts in lines.items() if parts]


def position(run: RunStart, epoch: float) -> str:
    """Return the position of the run in epochs: `epoch 1.28/3.2`."""
    total = total_epochs(run)
    return f"epoch {min(epoch, total):.2f}/{_epochs(total)}"


def _epochs(total: float) -> str:
    return f"{total:.3g}" if total < 1000 else f"{total:,.0f}"


def pace(record: StepRecord) -> str:
    """Return the learning rate, the speed, the utilization if known, and the share of time spent waiting for data."""
    rate = "" if record.learning_rate is None else f"lr {record.learning_rate:.4g}  "
    used = "  ".join([f"{speed(record.images_per_second)} images/s", *_utilization(record.used)])
    return f"{rate}{used}  data wait {record.data_wait_fraction:.0%}"


def closing(run: RunEnd, work_seconds: float) -> str:
    """Return the last line: the status, the time of training and validation, the last metrics, and the utilization."""
    line = f"{run.status} at step {run.step:,} after {duration(work_seconds)} of training and validation"
    line += f" ({duration(run.seconds)} in all)"
    line += {"preempted": "; the same command resumes it", "stopped": f": {run.reason}"}.get(run.status, "")
    splits = {VAL: run.validation, VAL_EMA: run.averaged}
    results = [f"{split} {format_metrics(metrics)}" for split, metrics in splits.items() if metrics]
    memory = [f"peak memory {size(run.used.peak_memory)}"] if run.used.peak_memory is not None else []
    return "  ".join([line, *results, *_utilization(run.used), *memory])


def _utilization(used: Usage) -> list[str]:
    return [f"MFU {used.flops_utilization:.1%}"] if used.flops_utilization is not None else []


def format_metrics(metrics: Mapping[str, float]) -> str:
    """Return metrics as text: `loss 0.4312 top-1 85.21%`."""
    return " ".join(measure(name, value) for name, value in metrics.items() if name != "count")


def _rate(record: EvaluationRecord) -> str:
    return f", {speed(record.seen / record.seconds)} images/s" if record.seconds > 0 else ""


def total_epochs(run: RunStart) -> float:
    """Return the length of the run in epochs. If the config gives the duration in epochs, this number is returned.

    A number computed from the steps may be larger, because the last step is a whole batch: six epochs of 1,497 examples
    are 281 steps of 32 examples, which are 6.01 epochs.
    """
    duration_of_config = run.config.get("train", {}).get("duration")
    if duration_of_config is not None and (length := Duration.parse(duration_of_config)).unit == "epochs":
        return float(length.amount)
    return run.total_steps * run.batch_size / run.num_examples


def count_parameters(params: Any) -> int:
    """Return the number of elements in a pytree of arrays or shapes."""
    import jax  # The line about a run that has ended needs no JAX.

    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class InputWaits:
    """The time that the steps of a run wait for images, from which it is said once what bounds the run."""

    def __init__(self, run: RunStart):
        self._run, self._seconds, self._waited, self._is_said = run, 0.0, 0.0, False
        self._begin, self._wanted, self._available = None, 0.0, 0.0

    def pause(self) -> None:
        """Leave out the work of the cores until the next record, because they evaluate."""
        self._begin = None

    def after(self, seconds: float, record: StepRecord) -> str | None:
        """Return what bounds the run and what helps, if it waits long; else None. A record's steps took `seconds`."""
        if self._is_said:
            return None
        self._seconds, self._waited = self._seconds + seconds, self._waited + seconds * record.data_wait_fraction
        end = _core_seconds() if record.data_wait_fraction >= _WAITED_SHARE else None
        if self._begin and end:
            self._wanted += end[0] - self._begin[0]
            self._available += end[1] - self._begin[1]
        self._begin = end
        if not self._available or self._waited < max(_WAITED_SECONDS, _WAITED_SHARE * self._seconds):
            return None
        self._is_said = True
        busy, said = min(self._wanted / self._available, 1.0), self._run.description
        work, helps = ("decoding", said.helps_decoding) if busy >= _BUSY else ("reading", said.helps_reading)
        waited = f"training waited for images {self._waited / self._seconds:.0%} of the time, and needed {busy:.0%} of "
        advice = f"; what helps: {helps}" if helps else ""
        return f"{waited}the cores meanwhile: {work} images bounds the run{advice}"


def _core_seconds() -> tuple[float, float]:
    """Return the seconds in which threads of this process have run or waited for a core, and the time of its cores."""
    waited = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):  # There are none if this is not Linux.
        with suppress(OSError, ValueError, IndexError):  # The thread has ended.
            waited += int(file.read_text().split()[1])
    return time.process_time() + waited / 1e9, time.monotonic() * num_cores()


class RunLines(Listener):
    """The lines that every display keeps on the screen: the start and the end of a run, its epochs and its evaluations.

    The line of an epoch also shows the evaluation at the epoch's last step, so it is shown after that evaluation.

    Args:
        keep: shows a line that stays on the screen.
    """

    def __init__(self, keep: Callable[[str], None]):
        self._keep = keep
        self._pending_epoch: StepRecord | None = None

    def start(self, run: RunStart) -> None:
        self._run, self._last, self._saved_before = run, run.start_step, phases.spent().get("save", 0.0)
        self._step_seconds = self._validation_seconds = 0.0
        self._last_validation: float | None = None
        self._waits = InputWaits(run)
        for line in opening(run):
            self._keep(line)

    def first_steps(self, record: StepRecord) -> None:
        seconds = self._seconds_of(record)
        left = self._left(record, seconds / max(record.step - self._run.start_step, 1))
        if left >= _LONG_SECONDS:
            end = time.localtime(time.time() + left)
            at = time.strftime("%H:%M" if left < _DAY_SECONDS else "%a %d %b, %H:%M", end)
            self._keep(f"about {duration(left)} left, until {at}, at {speed(record.images_per_second)} images/s")

    def step(self, record: StepRecord) -> None:
        self.flush()
        seconds = self._seconds_of(record)
        self._step_seconds += seconds
        self._last, self._pending_epoch = record.step, record if record.epoch_end is not None else None
        if line := self._waits.after(seconds, record):
            self._keep(line)

    def _seconds_of(self, record: StepRecord) -> float:
        """Return the seconds of the steps since the last record. `jaxddp runs` adds up the same from the log."""
        steps = (record.step - self._last) * self._run.batch_size
        return steps / record.images_per_second if record.images_per_second > 0 else 0.0

    def evaluation(self, record: EvaluationRecord) -> None:
        self._waits.pause()
        if not record.final:
            return
        self._validation_seconds += record.seconds
        # The averaged parameters are evaluated in the same validation, after the trained ones.
        earlier = 0.0 if record.split == VAL else self._last_validation or 0.0
        self._last_validation = earlier + record.seconds
        metrics = f"{record.split} {format_metrics(record.metrics)} ({counted(record.seen, 'image')}{_rate(record)})"
        if self._pending_epoch is not None and self._pending_epoch.step == record.step:
            self.flush(f"  {metrics}")
        else:
            self.flush()
            self._keep(f"step {record.step}  epoch {record.epoch:.2f}  {metrics}")

    def end(self, run: RunEnd) -> None:
        self.flush()
        self._keep(closing(run, self._step_seconds + self._validation_seconds))

    def flush(self, evaluated: str = "") -> None:
        """Show the line of the last finished epoch, with the text of an evaluation, if it is not shown yet."""
        if self._pending_epoch is not None and (end := self._pending_epoch.epoch_end) is not None:
            line = f"epoch {end.number:3d}  train {format_metrics(end.metrics)}{evaluated}"
            self._keep(f"{line}  {duration(end.seconds)}")
        self._pending_epoch = None

    def remaining(self, record: StepRecord) -> float | None:
        """Estimate the seconds left after a logged step that `step` has received; None if they are unknown.

        They are the mean time of a step so far, with saving, for each step that is left, and the time of the last
        validation for each validation. Compiling is left out. Before the first validation, an image is assumed to take
        a third of its time in training, because there is no backward pass.
        """
        if not self._step_seconds:
            return None
        saving = phases.spent().get("save", 0.0) - self._saved_before
        return self._left(record, (self._step_seconds + saving) / (record.step - self._run.start_step))

    def _left(self, record: StepRecord, step_seconds: float) -> float:
        run = self._run
        unknown = run.num_validation / run.batch_size * step_seconds / 3
        validation = unknown if self._last_validation is None else self._last_validation
        return (run.total_steps - record.step) * step_seconds + record.validations_left * validation


class PlainLines(RunLines):
    """A line for each logged step, epoch and evaluation; an epoch and the evaluation at its end share a line.

    If the output cannot be written (its disk is full, or the program that reads it has ended), training continues
    without printing more lines.
    """

    def __init__(self, stream: TextIO):
        super().__init__(partial(say, stream=stream))

    def step(self, record: StepRecord) -> None:
        # It prints the line of an epoch without an evaluation at its end, which comes before this step's line.
        super().step(record)
        line = f"step {record.step}/{self._run.total_steps}  {position(self._run, record.epoch)}"
        left = duration(self.remaining(record))
        self._keep(f"{line}  {format_metrics(record.metrics)}  {pace(record)}  ETA {left}")


class TerminalScreen:
    """A terminal. The picture is redrawn at the bottom, below the kept lines and the output of the program."""

    def __init__(self, stream: TextIO):
        from rich.console import Console
        from rich.live import Live

        # The caller has checked that this is a terminal; variables such as FORCE_COLOR must not change that.
        self._console = Console(file=stream, force_terminal=True, force_jupyter=False, highlight=False)
        is_stdout = stream is sys.stdout
        redirected = {"redirect_stdout": is_stdout, "redirect_stderr": is_stdout and sys.stderr.isatty()}
        # Each record redraws the picture, so rich needs no refresh thread, which could outlive an abrupt exit.
        self._live = Live(console=self._console, auto_refresh=False, transient=True, **redirected)

    def draw(self, picture: Any) -> None:
        self._live.start()
        self._live.update(picture, refresh=True)

    def keep(self, line: str) -> None:
        from rich.text import Text

        text = Text(line)
        for words, style in _STYLES.items():
            text.highlight_regex(rf"\b{words}\b", style)
        self._console.print(text, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


class NotebookScreen:
    """A notebook's cell. The picture is one display above the lines. Drawing needs IPython, but not ipywidgets."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, picture: Any) -> None:
        from IPython.display import display

        if self._handle is None:
            self._handle = display(picture, display_id=True)
        else:
            self._handle.update(picture)

    def keep(self, line: str) -> None:
        print(line)

    def close(self) -> None:
        self._handle = None


class LiveDisplay(RunLines):
    """A progress bar with the time left. Below the bar are the last metrics, or the activity between steps.

    During an evaluation there is a second bar. The lines of epochs, and of evaluations between epochs, stay.
    """

    def __init__(self, screen: TerminalScreen | NotebookScreen):
        super().__init__(screen.keep)
        self._screen = screen
        self._metrics, self._activity, self._last_frame = "waiting for the first step", "", 0.0
        self._activity_reports = ExitStack()
        # The thread of `jaxddp.core.phases.show_on` draws the seconds of an activity, while the training thread waits.
        self._lock, self._is_over = threading.RLock(), False

    def start(self, run: RunStart) -> None:
        super().start(run)
        self._set_step(run.start_step, run.start_step * run.batch_size / run.num_examples, None)
        self._draw()
        self._activity_reports.enter_context(phases.reported_to(self._show_activity))

    def step(self, record: StepRecord) -> None:
        super().step(record)
        self._set_step(record.step, record.epoch, self.remaining(record))
        self._metrics = f"{format_metrics(record.metrics)}  {pace(record)}"
        self._draw(at_once=record.epoch_end is not None)

    def evaluation(self, record: EvaluationRecord) -> None:
        super().evaluation(record)
        done = f"{record.seen:,}/{record.total:,}{_rate(record)}  {format_metrics(record.metrics)}"
        bar = record.split, record.seen, record.total, COLOURS[VAL], done
        self._draw(*([] if record.final else [bar]), at_once=record.final)

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

    def _set_step(self, step: int, epoch: float, remaining: float | None) -> None:
        total = self._run.total_steps
        text = f"step {step:,}/{total:,}  {position(self._run, epoch)}  ETA {duration(remaining)}"
        self._training = "train", step, total, COLOURS["train"], text

    def _draw(self, *bars: tuple[str, int, int, str, str], at_once: bool = False) -> None:
        """Draw bars: for each its name, the work that is done, all work, its colour, and the text after it."""
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        with self._lock:
            now = time.monotonic()
            if not at_once and now - self._last_frame < SECONDS_BETWEEN_FRAMES:
                return
            self._last_frame = now
            grid = Table.grid(Column(no_wrap=True), Column(ratio=1), Column(no_wrap=True), padding=(0, 1), expand=True)
            for name, done, total, colour, text in (self._training, *bars):
                bar = ProgressBar(total=max(total, 1), completed=done, complete_style=colour, finished_style=colour)
                grid.add_row(Text(name, colour), bar, Text(text))
            picture = Table.grid(expand=True)
            picture.add_row(grid)
            picture.add_row(Text(self._activity or self._metrics, no_wrap=True, overflow="ellipsis"))
            self._screen.draw(picture)
