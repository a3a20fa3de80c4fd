"""Process 0 shows long activities on the screen, and its thread for them ends with the command."""

import io
import re
import sys
import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.listeners import run_start

import jaxddp.core.phases as phases
from jaxddp.cli import main
from jaxddp.command_line.terminal import StatusLine
from jaxddp.core.phases import BYTES, Activity
from jaxddp.training.events import RunEnd
from jaxddp.training.progress import LiveDisplay


def activity_threads() -> list[str]:
    """Return the names of the threads that show activities."""
    return [thread.name for thread in threading.enumerate() if thread.name == "jaxddp-activity"]


@pytest.fixture
def short_delays(monkeypatch):
    monkeypatch.setattr(phases, "PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(phases, "_UPDATE_SECONDS", 0.02)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_the_shown_description_is_that_of_the_innermost_block_of_the_first_thread():
    descriptions: list[str] = []
    with phases.reported_to(descriptions.append), phases.doing("reading"):
        with phases.phase("compile", "compiling"), phases.phase("agreement"):
            assert descriptions[-1] == "compiling" and phases.progress().phase == "agreement"
        assert descriptions[-1] == "reading"
        # Other threads do not change the description.
        thread = threading.Thread(target=lambda: phases.doing("beside").__enter__())
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError), phases.phase("training", ""):
            assert descriptions[-1] == ""
            raise RuntimeError
    assert descriptions == ["", "reading", "compiling", "reading", "", "reading", "", ""]


def test_long_activities_are_shown_and_short_ones_are_not(short_delays):
    lines: list[str] = []
    with phases.show_on(lambda activity: lines.append(activity.description), lambda: lines.append("")):
        with phases.doing("reading"):
            wait_until(lambda: lines.count("reading") > 2)
        assert lines[-1] == ""
        phases.PATIENCE_SECONDS = 3600
        with phases.doing("compiling"):
            pass
    assert "compiling" not in lines and lines[-1] == "" and activity_threads() == []


@pytest.fixture
def clock(monkeypatch):
    """Return the time of `time.monotonic`, in a list."""
    times = [1000.0]
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: times[0])
        yield times
    # The last progress has the time of this clock, and other tests wait for processes that make no progress.
    with phases.doing("resetting the clock"):
        pass


def lines_at(status_line: StatusLine, activity: Activity, clock: list[float], seconds: Iterable[int]) -> None:
    """Show an activity, which begins now, after some numbers of seconds."""
    began = clock[0]
    for second in seconds:
        clock[0] = began + second
        status_line.show(activity._replace(began=began, done=second if activity.total else 0))


def test_without_a_terminal_the_lines_of_an_activity_become_sparse(clock, capfd):
    status_line = StatusLine()
    lines_at(status_line, Activity("compiling the step"), clock, range(1, 80))
    status_line.clear()
    lines_at(status_line, Activity("verifying", 100, "file"), clock, range(1, 11))
    lines_at(status_line, Activity("verifying", 100, "file"), clock, range(1, 5))
    output = capfd.readouterr()
    assert output.out == "" and output.err.splitlines() == [
        "compiling the step ...",
        "compiling the step ... 10 s",
        "compiling the step ... 40 s",
        "compiling the step ... 1 min 10 s",
        "verifying ...",
        "verifying ... 10 of 100 files, 10 s, 1 min 30 s left",
    ]


@pytest.mark.parametrize(
    ("activity", "details"),
    [
        (Activity("x", done=12_345, noun="row"), "12,345 rows, 24 s"),
        (Activity("x", 1024, "file", done=256), "256 of 1,024 files, 24 s, 1 min 12 s left"),
        (Activity("x", 10, "file", done=12), "12 of 10 files, 24 s"),
        (Activity("x", 4_000_000_000, BYTES, done=1_000_000_000), "1.0 GB of 4.0 GB, 24 s, 1 min 12 s left"),
        (Activity("x", 8, "image", done=4, note="3 images/s"), "4 of 8 images, 24 s, 24 s left, 3 images/s"),
    ],
)
def test_the_details_of_an_activity(activity, details, clock):
    assert activity._replace(began=clock[0] - 24).details() == details


def test_progress_belongs_to_the_innermost_activity_and_keeps_its_time(clock):
    with phases.doing("indexing", 8, "file"):
        phases.reached(3)
        clock[0] += 5
        with phases.doing("waiting"):
            phases.reached(1)
            assert (phases.activity().description, phases.activity().seconds) == ("waiting", 0)
        # A part with the same description, or with none, goes on with the activity.
        with phases.doing("indexing"), phases.phase("agreement"):
            phases.reached(4)
        assert phases.activity() == Activity("indexing", 8, "file", clock[0] - 5, 4)
        assert phases.activity().seconds == 5 and phases.activity().share == 0.5
    assert phases.activity() == Activity()


@pytest.mark.parametrize(
    ("columns", "details"), [(80, "━" * 5 + "─" * 15 + " 2 of 8 files"), (40, "2 of 8 files"), (20, "")]
)
def test_on_a_terminal_the_activity_line_fits_the_width_and_is_erased(columns, details, monkeypatch, clock):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    sys.stderr.isatty = lambda: True
    status_line = StatusLine()
    status_line.show(Activity("verifying", 8, "file", clock[0] - 5, 2))
    status_line.clear()
    written = sys.stderr.getvalue()
    words = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\r", "", written)
    assert words.startswith(f"verifying ... {details}") and len(words) <= columns
    assert written.endswith("\x1b[2K") and "\n" not in written


@pytest.mark.parametrize("process", [None, 1])
def test_a_command_shows_long_activities_in_process_0_only(process, short_delays, monkeypatch, tmp_path, capfd):
    if process is not None:
        for name, value in {"COORDINATOR_ADDRESS": "h:1", "NUM_PROCESSES": "2", "PROCESS_ID": str(process)}.items():
            monkeypatch.setenv(f"JAX_{name}", value)
    recipe = tmp_path / "slow.py"
    recipe.write_text("import time\ntime.sleep(0.3)\ndef get_config(): raise ValueError('enough')\n")
    assert main(["train", str(recipe)]) == 2
    *lines, last = capfd.readouterr().err.splitlines()
    assert lines == ([] if process else [f"reading {recipe} ..."]) and "enough" in last
    assert activity_threads() == []


class Frames(SimpleNamespace):
    """A screen of a live display, which records the last line of each picture."""

    def draw(self, picture: object) -> None:
        console = Console(file=io.StringIO(), width=100, force_terminal=False)
        console.print(picture)
        self.drawn.append(console.file.getvalue().splitlines()[-1].strip())


def test_a_live_display_shows_the_seconds_of_an_activity(clock):
    frames = Frames(drawn=[], keep=print, close=str)
    display = LiveDisplay(frames)
    display.start(run_start())
    with phases.doing("compiling the step"):
        assert frames.drawn[-1] == "compiling the step"
        clock[0] += 24
        phases.repeat()
        assert frames.drawn[-1] == "compiling the step ... 24 s"
    assert frames.drawn[-1] == "waiting for the first step"
    display.end(RunEnd("done", 1, 1.0))
    drawn = len(frames.drawn)
    display._show_activity("late")
    assert len(frames.drawn) == drawn


def test_reading_images_reports_its_number_speed_and_faults(clock, capsys):
    with phases.counting_images("checking images", 8) as progress:
        clock[0] += 1
        progress(1, 0)
        progress(2, 1, "a.jpg: bad")
        wanted = Activity("checking images", 8, "image", clock[0] - 1, 2, "2 images/s, 1 cannot be used")
        assert phases.activity() == wanted and wanted.details().startswith("2 of 8 images, 1 s, 3 s left, ")
    assert phases.activity() == Activity() and capsys.readouterr().out == "a.jpg: bad\n"
