"""The output of an invented run in a pipe, in a terminal and in a notebook."""

import dataclasses
import io
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import nbformat
import numpy as np
import pexpect
import pytest
from nbclient import NotebookClient
from rich.console import Console
from support.listeners import TOTAL, drive, evaluation_record, run_start, step_record

from jaxddp.command_line.terminal import print_table
from jaxddp.core.errors import InputError, on_screen
from jaxddp.training import progress
from jaxddp.training.events import Description, RunEnd, Usage
from jaxddp.training.progress import PlainLines

USED = Usage(flops_per_step=24 * 10**12, flops_utilization=0.41234, peak_memory=12_345_678_901)


def test_metrics_and_a_known_utilization_are_printed_readably() -> None:
    assert progress.pace(step_record(1, used=USED)) == "lr 0.03333  1,234 images/s  MFU 41.2%  data wait 14%"
    assert progress.pace(step_record(1, used=Usage(peak_memory=7))) == "lr 0.03333  1,234 images/s  data wait 14%"
    closing = "done at step 9 after 40.0 s of training and validation (1 min 01 s in all)  MFU 41.2%  peak memory 12 GB"
    assert progress.closing(RunEnd("done", 9, 61.0, used=USED), 40.0) == closing
    metrics = {"loss": 0.43211, "top1": 0.85214, "top10": 1.0, "count": 5, "loss_scale": 32768.0, "tiny": 1.25e-6}
    shown = "loss 0.4321 top-1 85.21% top-10 100.00% loss_scale 3.277e+04 tiny 1.25e-06"
    assert progress.format_metrics(metrics) == shown


def test_control_characters_in_names_are_shown_and_not_executed(capsys) -> None:
    name = "a\x1b[31mb\x07\u202ec\udcff\x9b d\u00e9\u200d"
    escaped = r"a\x1b[31mb\x07\u202ec\udcff\x9b d" + "\u00e9\u200d"
    assert on_screen(name) == escaped == str(InputError(name))
    print_table(["name"], [[name], [(name, "green")]])
    assert capsys.readouterr().out.count(escaped) == 2
    assert escaped in progress.opening(run_start(class_names=(name,)))[0]


def test_the_printed_number_of_epochs_is_the_requested_number() -> None:
    config = {"train": {"duration": "6 epochs"}}
    run = run_start(total_steps=281, batch_size=32, num_examples=1497, config=config)
    assert progress.opening(run)[-1].startswith("training: 281 steps (6 epochs) | ")
    long = dataclasses.replace(run, total_steps=47_905, config={})
    assert progress.opening(long)[-1].startswith("training: 47,905 steps (1,024 epochs) | ")
    assert progress.position(long, 12) == "epoch 12.00/1,024"
    assert progress.position(run, 281 * 32 / 1497) == "epoch 6.00/6"


@pytest.mark.parametrize(
    ("waits", "cores", "said"),
    [
        (0.4, 0.9, "40% of the time, and needed 90% of the cores meanwhile: decoding images bounds the run; … pack"),
        (0.5, 0.1, "50% of the time, and needed 10% of the cores meanwhile: reading images bounds the run; … cache"),
        (0.2, 0.9, None),
    ],
)
def test_a_run_that_waits_for_images_is_told_once_why(waits, cores, said, monkeypatch) -> None:
    spent, printed = np.zeros(2), list[str]()
    monkeypatch.setattr(progress, "_core_seconds", lambda: tuple(spent))
    shown = progress.RunLines(printed.append)
    shown.start(run_start(description=Description(helps_decoding="pack", helps_reading="cache")))
    # A step takes 8 s. The work of an evaluation is not that of training.
    for step in range(1, 7):
        spent += cores, 1
        shown.step(step_record(step, images_per_second=4.0, data_wait_fraction=waits))
        assert step > 2 or not any("waited" in line for line in printed)
        if step == 1:
            spent += 1 - cores, 1
            shown.evaluation(evaluation_record(step, seen=9))
    lines = [f"training waited for images {said}".replace("…", "what helps:")] if said else []
    assert [line for line in printed if "waited" in line] == lines


@pytest.mark.parametrize(("steps", "left"), [(11, ""), (1010, "16 min 40 s left, until 06:16")])
def test_the_time_left_is_said_after_ten_steps(steps, left, monkeypatch) -> None:
    six = SimpleNamespace(**{**vars(time), "time": lambda: 6 * 3600, "localtime": time.gmtime})
    monkeypatch.setattr(progress, "time", six)
    shown = progress.RunLines((printed := list[str]()).append)
    shown.start(run_start(total_steps=steps))
    shown.first_steps(step_record(10, images_per_second=32.0))
    assert printed[3:] == ([f"about {left}, at 32 images/s"] if left else [])


def test_the_remaining_time_is_exact_in_a_run_with_constant_times(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = [7.0]
    monkeypatch.setattr(progress.phases, "spent", lambda: {"save": saved[0]})
    shown = progress.RunLines(lambda line: None)
    # A step takes 2 s. A validation takes a third of the time per image, 240 / 32 * 2 s / 3 = 5 s, of both splits.
    shown.start(run_start(start_step=1, num_validation=240))
    validated, left = (4, 7, 10), {step: 2.0 * (TOTAL - step) for step in range(TOTAL + 1)}
    for step in range(2, TOTAL + 1):
        later = [each for each in validated if each >= step]
        record = step_record(step, images_per_second=16.0, validations_left=len(later))
        shown.step(record)
        assert shown.remaining(record) == pytest.approx(left[step] + 5 * len(later))
        for split in ("val", "val_ema") if step in validated else ():
            shown.evaluation(evaluation_record(step, split=split))
    # Saving is a part of the time of a step: 1 s for each of the four steps so far.
    shown.start(run_start())
    shown.step(step_record(4, images_per_second=16.0))
    saved[0] += 4
    assert shown.remaining(step_record(4)) == 6 * 3.0
    shown.start(run_start())
    shown.step(step_record(1, images_per_second=0.0))
    assert shown.remaining(step_record(1)) is None


def test_a_run_prints_opening_step_epoch_and_closing_lines() -> None:
    """An epoch and the evaluation at its end share a line."""
    listener = PlainLines(stream := io.StringIO())
    said = Description("resnet10 in bfloat16", "class folders in seg_train/", "class folders in seg_test/")
    names = ("tench, Tinca tinca", "Staffordshire_bullterrier", "cat", "dog")
    more = {"class_names": names, "num_validation": 77, "description": said}
    listener.start(run_start(2, params={"bias": np.zeros(4)}, workdir=Path("runs/demo"), **more))
    for step in range(3, TOTAL + 1):
        listener.step(step_record(step))
        if step in (4, 5):
            listener.evaluation(evaluation_record(step, seen=10))
            listener.evaluation(evaluation_record(step))
    listener.evaluation(evaluation_record(10, split="ema"))
    listener.end(RunEnd("preempted", 8, 61.0))
    printed = stream.getvalue().splitlines()
    assert printed[:5] == [
        "data: 100 examples of 4 classes (tench, Staffords…ullterrier, cat, ...) | class folders in seg_train/",
        "validation: 77 examples | class folders in seg_test/",
        "network: resnet10 in bfloat16 | 4 parameters",
        "training: 10 steps (3.2 epochs) | global batch 32 on 4 x cpu in 2 processes | resuming at step 2"
        " | writing to runs/demo",
        "step 3/10  epoch 0.96/3.2  loss 1.0472 top-1 23.08% top-5 25.00%  lr 0.03333  1,234 images/s  data wait 14%"
        "  ETA 0.2 s",
    ]
    assert [line for line in printed[5:] if not re.match(r"step [0-9]+/10 ", line)] == [
        "epoch   1  train loss 1.0000 top-1 36.36%  val loss 0.6796 top-1 23.53% (77 images, 31 images/s)  7.2 s",
        "step 5  epoch 1.60  val loss 0.5437 top-1 29.41% (77 images, 31 images/s)",
        "epoch   2  train loss 0.5714 top-1 63.64%  7.2 s",
        "epoch   3  train loss 0.4000 top-1 90.91%  ema loss 0.2718 top-1 58.82% (77 images, 31 images/s)  7.2 s",
        "preempted at step 8 after 7.7 s of training and validation (1 min 01 s in all); the same command resumes it",
    ]


PROGRAM = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from support.listeners import drive
from jaxddp.training.progress import progress

drive(progress(), start=2)
"""

CLOSING = "done at step 10 after 5.2 s of training and validation (1 min 30 s in all)  val loss 0.2718 top-1 58.82%"
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "TERM": "xterm-256color"}


@pytest.mark.slow
def test_a_run_continues_after_the_reader_of_its_output_has_ended() -> None:
    read, write = os.pipe()
    os.close(read)
    program = PROGRAM + "print('and more', flush=True)"
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, env=ENVIRONMENT)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.ci
def test_a_terminal_gets_a_live_display_whose_epoch_lines_stay() -> None:
    child = pexpect.spawn(sys.executable, ["-c", PROGRAM], dimensions=(24, 120), encoding="utf-8", env=ENVIRONMENT)
    child.expect(pexpect.EOF, timeout=60)
    child.close()
    assert child.exitstatus == 0
    raw = child.before
    frames = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw).replace("\r", "\n")
    # The bar begins at the restored step, and shows remaining time, speed and the progress of the evaluation.
    assert re.search(r"train ━+.*step 2/10", frames)
    assert re.search(r"step 4/10  epoch 1\.28/3\.2  ETA \d", frames)
    assert re.search(r"loss 0\.7854 top-1 30\.77% .*1,234 images/s", frames)
    # Each lasting line is printed once; at the end the bar is erased and the cursor is visible again.
    lasting_lines = [line for line in frames.splitlines() if line.startswith(("epoch ", "done "))]
    assert lasting_lines == [
        "epoch   1  train loss 1.0000 top-1 36.36%  val loss 0.6796 top-1 23.53% (77 images, 31 images/s)  7.2 s",
        "epoch   2  train loss 0.5714 top-1 63.64%  7.2 s",
        "epoch   3  train loss 0.4000 top-1 90.91%  val loss 0.2718 top-1 58.82% (77 images, 31 images/s)  7.2 s",
        CLOSING,
    ]
    after_last_bar = raw[raw.rfind("━") :]
    assert "\x1b[2K" in after_last_bar and "\x1b[?25h" in after_last_bar


def test_the_live_display_shows_how_far_an_evaluation_is(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def draw(picture: object) -> None:
        console = Console(file=io.StringIO(), width=100, force_terminal=False)
        console.print(picture)
        drawn.append(console.file.getvalue())

    screen = SimpleNamespace(draw=draw, keep=lambda line: None, close=lambda: None)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_FRAMES", 0)
    drive(progress.LiveDisplay(screen))
    during = [frame for frame in drawn if "val" in frame]
    assert [re.search(r"val .* (\d+/77, .*%)", frame)[1] for frame in during] == [
        "32/77, 13 images/s  loss 0.6796 top-1 23.53%",
        "64/77, 26 images/s  loss 0.6796 top-1 23.53%",
        "32/77, 13 images/s  loss 0.2718 top-1 58.82%",
        "64/77, 26 images/s  loss 0.2718 top-1 58.82%",
    ]
    assert all("train" in frame and "ETA" in frame for frame in drawn)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_FRAMES", 3600)
    drawn.clear()
    drive(progress.LiveDisplay(screen))
    # Only ends of epochs and evaluations are drawn at once; other records share frames.
    assert len(drawn) < 10


def test_without_rich_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm")
    assert type(progress.progress(terminal)).__name__ == "LiveDisplay"
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress.progress(terminal), PlainLines)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(progress.progress(io.StringIO()), PlainLines)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(progress.progress(terminal), PlainLines)


@pytest.mark.ci
def test_a_notebook_gets_one_display_and_a_history_with_a_picture(tmp_path: Path) -> None:
    program = PROGRAM.replace("drive(progress(), start=2)", "from jaxddp.training.listeners.jsonl import History")
    code = program + "history = History()\ndrive(progress(), history)\nhistory"
    error = "from jaxddp.config import load\nload('absent')"
    cells = [nbformat.v4.new_code_cell(text) for text in (code, "'matplotlib.pyplot' in sys.modules", error)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    NotebookClient(notebook, timeout=60, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = notebook.cells[0].outputs
    (display,) = (output for output in outputs if output.output_type == "display_data")
    assert "step 10/10" in display.data["text/html"]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "  val loss 0.2718 top-1 58.82% (77 images, 31 images/s)  7.2 s\n" in printed
    assert "image/png" in outputs[-1].data
    assert outputs[-1].data["text/plain"].startswith("History(10 logged steps, 3 epochs, 2 evaluations")
    # Drawing did not change the notebook's plotting.
    assert notebook.cells[1].outputs[0].data["text/plain"] == "False"
    # An error shows the line of the cell, and no frame of the package.
    shown = "".join(notebook.cells[2].outputs[0].traceback)
    assert shown.count("File") == 1 and ", line 2, in <module>\n    load('absent')\n" in shown
    assert "\nInputError: config 'absent' does not exist; " in shown
