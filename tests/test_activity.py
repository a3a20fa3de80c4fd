"""Process 0 shows long activities on the screen, and its thread for them ends with the command."""

import io
import re
import sys
import threading
import time

import pytest
from support.listeners import run_start

import jaxddp.core.phases as phases
import jaxddp.job.activity as activity
from jaxddp.cli import main
from jaxddp.command_line.terminal import StatusLine
from jaxddp.training.progress.live import LiveDisplay


class RecordedScreen:
    """A screen that records its lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def show(self, description: str, seconds: float) -> None:
        self.lines.append(description)

    def clear(self) -> None:
        self.lines.append("")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def activity_threads() -> list[str]:
    """Return the names of the threads that show activities."""
    return [thread.name for thread in threading.enumerate() if thread.name == "jaxddp-activity"]


@pytest.fixture
def short_delays(monkeypatch):
    monkeypatch.setattr(activity, "PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(activity, "_UPDATE_SECONDS", 0.02)


def wait_until(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def test_the_shown_description_is_that_of_the_innermost_block_with_a_description():
    descriptions: list[str] = []
    with phases.reported_to(descriptions.append), phases.doing("reading"):
        with phases.phase("compile", "compiling"), phases.phase("agreement"):
            assert descriptions[-1] == "compiling" and phases.progress().phase == "agreement"
        assert descriptions[-1] == "reading"
        with pytest.raises(RuntimeError), phases.phase("training", ""):
            assert descriptions[-1] == ""
            raise RuntimeError
    assert descriptions == ["", "reading", "compiling", "reading", "", "reading", "", ""]


def test_only_the_last_listener_is_called():
    outer, inner = [], []
    with phases.reported_to(outer.append), phases.doing("one"):
        with phases.reported_to(inner.append), phases.doing("two"):
            assert (outer[-1], inner[-1]) == ("", "two")
        assert (outer[-1], inner[-1]) == ("one", "")


def test_other_threads_do_not_change_the_description():
    descriptions: list[str] = []
    with phases.reported_to(descriptions.append), phases.phase("start", "training"):
        thread = threading.Thread(target=lambda: phases.doing("beside").__enter__())
        thread.start()
        thread.join()
    assert "beside" not in descriptions


def test_long_activities_are_shown_and_short_ones_are_not(short_delays):
    screen = RecordedScreen()
    with activity.show_on(screen):
        with phases.doing("reading"):
            wait_until(lambda: screen.lines.count("reading") > 2)
        assert screen.lines[-1] == ""
        activity.PATIENCE_SECONDS = 3600
        with phases.doing("compiling"):
            pass
    assert "compiling" not in screen.lines and screen.lines[-1] == ""
    assert activity_threads() == []


def test_without_a_terminal_an_activity_prints_a_lasting_line(capfd):
    status_line = StatusLine()
    for seconds in (1.0, 2.0):
        status_line.show("compiling the step", seconds)
    status_line.clear()
    status_line.show("saving step 4", 1.0)
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "compiling the step ...\nsaving step 4 ...\n")


def test_on_a_terminal_the_activity_line_fits_the_width_and_is_erased(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys, "stderr", Terminal())
    status_line = StatusLine()
    status_line.show("reading " + "x" * 100, 1.0)
    status_line.clear()
    written = sys.stderr.getvalue()
    assert written.endswith("\x1b[2K") and "\n" not in written
    assert 0 < len(re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\r", "", written)) <= 20


@pytest.mark.parametrize("process", [None, 0, 1])
def test_a_command_shows_long_activities_in_process_0_only(process, short_delays, monkeypatch, tmp_path, capfd):
    if process is not None:
        environ = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(process)}
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
    recipe = tmp_path / "slow.py"
    recipe.write_text("import time\ntime.sleep(0.3)\ndef get_config(): raise ValueError('enough')\n")
    assert main(["train", str(recipe)]) == 2
    *lines, last = capfd.readouterr().err.splitlines()
    assert lines == ([] if process else [f"reading {recipe} ..."]) and "enough" in last
    assert activity_threads() == []


def test_a_live_display_shows_a_long_activity_in_place_of_the_last_metrics():
    class Frames:
        def __init__(self) -> None:
            self.drawn: list[str] = []

        def draw(self, picture: object) -> None:
            from rich.console import Console

            console = Console(file=io.StringIO(), width=100, force_terminal=False)
            console.print(picture)
            self.drawn.append(console.file.getvalue().splitlines()[-1].strip())

        def keep(self, line: str) -> None:
            pass

        def close(self) -> None:
            pass

    frames = Frames()
    display = LiveDisplay(frames)
    display.start(run_start())
    with phases.doing("compiling the step"):
        assert frames.drawn[-1] == "compiling the step"
    assert frames.drawn[-1] == "waiting for the first step"
    display._activity_reports.close()
