"""The command line: exit codes, one-line errors, and runs that end, are killed and resume."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import optax
import pytest
from support.cases import ci_case, rare_case
from support.data import random_table, write_arrays
from support.ilsvrc import write_tree
from support.networks import largest_difference
from support.peers import Second
from support.runs import RECIPE, fails, metrics, train_words

import jaxddp
from jaxddp.cli import main
from jaxddp.command_line.parse import workdir_of
from jaxddp.command_line.terminal import _replaced, _Writer
from jaxddp.commands.eval import parse_eval
from jaxddp.core.peers import ALONE
from jaxddp.inference.pretrained import evaluate_weights
from jaxddp.inference.trained import evaluate_checkpoint
from jaxddp.recipe.file import read_recipe
from jaxddp.setup.run_setup import initialize, open_recipe
from jaxddp.training.checkpoints.manager import Checkpoints

TRAIN = "LOC_train_solution.csv"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """39 training and 11 validation examples, neither a multiple of the batch size 8."""
    file = tmp_path_factory.mktemp("data") / "images.npz"
    return write_arrays(file, random_table(39, image=16), random_table(11, seed=1, image=16))


def load_parameters(workdir: Path, data: Path) -> dict:
    """Return the parameters of the latest checkpoint."""
    recipe = read_recipe(RECIPE)
    recipe = replace(recipe, config=recipe.config.replace(data={"path": str(data)}))
    checkpoints = Checkpoints(workdir / "checkpoints")
    state, _ = checkpoints.restore(checkpoints.latest() or 0, initialize(open_recipe(recipe)).state)
    checkpoints.close()
    return state.params


# Options for tests that need neither several devices nor pictures.
PLAIN = ["--parallel.devices", "1", "--log.to", "jsonl"]


@pytest.fixture(scope="module")
def finished_run(data, tmp_path_factory) -> Path:
    """The work directory of a run of 12 steps on 8 simulated devices."""
    workdir = tmp_path_factory.mktemp("run") / "whole"
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(train_words(data, workdir, "--train.duration", "12 steps")) == 0
    assert "curves.png" in output.getvalue() and f"writing to {workdir}\n" in output.getvalue()
    return workdir


@pytest.mark.slow
def test_a_run_writes_the_documented_files(finished_run):
    result = json.loads((finished_run / "result.json").read_text())
    assert (result["status"], result["step"], result["devices"], result["processes"]) == ("done", 12, 8, 1)
    assert result["val"]["count"] == 11
    assert json.loads((finished_run / "config.json").read_text())["train"]["batch_size"] == 8
    assert {line["split"] for line in metrics(finished_run)} == {"train", "val"}
    assert (finished_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (finished_run / "parameters.txt").stat().st_size > 0


@pytest.mark.slow
def test_eval_prints_the_metrics_of_the_run(finished_run, data, capfd):
    # Training smooths the labels; validation and `eval` do not.
    arguments = ["eval", RECIPE, "--data.path", str(data), "--workdir", str(finished_run)]
    code, (output, err) = main(arguments), capfd.readouterr()
    assert code == 0 and "read only" not in err
    figures = dict(line.split(": ") for line in output.splitlines())
    expected = json.loads((finished_run / "result.json").read_text())["val"]
    assert (figures["step"], figures["count"]) == ("12", "11")
    assert all(figures[name] == f"{expected[name]:.7g}" for name in ("loss", "top1"))
    message = f"{finished_run / 'checkpoints'}: no checkpoint '7'; give latest, best or one of the steps"
    # The config of a run is in its work directory.
    for words in (arguments, ["eval", str(finished_run / "config.json"), "--parallel.cpu-devices", "None"]):
        assert message in fails([*words, "--step", "7"], capfd)


@pytest.mark.parametrize("peers", [ALONE, Second()])
def test_only_one_process_of_a_job_prints_the_metrics_of_eval(peers, data, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("jaxddp.inference.trained.evaluate_checkpoint", lambda *arguments: {"loss": 0.5, "top1": 1.0})
    monkeypatch.setattr("jaxddp.core.peers.joined", lambda: peers)
    assert main(["eval", RECIPE, "--data.path", str(data), "--workdir", str(tmp_path)]) == 0
    shown = f"loss: 0.5\ntop1: 1\n{tmp_path}: loss 0.5000 top-1 100.00%\n"
    assert capfd.readouterr().out == (shown if peers.is_first else "")


@pytest.mark.slow
def test_weights_are_measured_without_a_run_and_their_metrics_equal_those_of_their_run(
    finished_run, data, tmp_path, monkeypatch, capfd
):
    assert main(["export", str(finished_run), "--out", str(tmp_path / "net.safetensors")]) == 0
    recipe = tmp_path / "untrained.yaml"
    recipe.write_text(f"base: {Path(RECIPE).resolve()}\nmodel:\n  weights: {tmp_path / 'net.safetensors'}\n")
    words = [str(recipe), "--data.path", str(data)]
    file = parse_eval([*words, "--step", "0"])[1]
    expected = evaluate_checkpoint(parse_eval([str(finished_run)])[1], finished_run)
    assert evaluate_weights(file) == {name: value for name, value in expected.items() if name != "step"}
    before = [*tmp_path.rglob("*")]
    monkeypatch.chdir(tmp_path)
    capfd.readouterr()
    assert main(["eval", *words]) == 0
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'net.safetensors'}: loss ") and f"top-1 {expected['top1']:.2%}" in last
    assert [*tmp_path.rglob("*")] == before
    line = fails(["eval", *words, "--workdir", "none"], capfd)
    assert line == "jaxddp: none: no such work directory; check --workdir, or name weights to evaluate (model.weights)"
    assert "or name weights to evaluate (model.weights)" in fails(["eval", RECIPE, *words[1:]], capfd)


@pytest.mark.slow
def test_a_file_of_weights_is_measured_on_some_of_its_classes(data, tmp_path, capfd):
    table, weights = random_table(8, image=16), tmp_path / "net.safetensors"
    network = jaxddp.resnet("resnet10", table.num_classes, width=2, stem="small")
    setup = jaxddp.prepare_training(network, table, None, optax.sgd(1.0), 1)
    jaxddp.export_weights(setup.state, setup, weights)
    words = ["eval", str(weights), "--data.path", str(data), "--model.name", "resnet10", "--model.width", "2"]
    words += ["--model.stem", "small", "--data.image-size", "16", "--data.resize", "16"]
    for key in ("mean", "std"):
        words += [f"--data.{key}", *map(str, getattr(setup.config.data, key))]
    assert main([*words, "--data.classes", "3,4"]) == 0
    figures = dict(line.split(": ") for line in capfd.readouterr().out.splitlines())
    val = random_table(11, seed=1, image=16)
    expected = jaxddp.evaluate(setup.state, setup, val.rows(np.flatnonzero(val.labels >= 3)))
    assert int(figures["count"]) == expected["count"] > 0
    assert figures["loss"] == f"{expected['loss']:.7g}" and figures["top1"] == f"{expected['top1']:.7g}"
    others = write_arrays(tmp_path / "others.npz", *[table.select("0:3")] * 2)
    words[3] = str(others)
    message = "fc.weight is [5, 16] in the file and [3, 16] in the network; give weights and data with the same classes"
    assert message in fails(words, capfd)
    rgba = ["export", str(weights), "--out", "net.stablehlo", *words[4:], "--data.channels", "4"]
    assert "have 4 channels; give a value for each channel, or one for all" in fails(rgba, capfd)
    assert "--workdir: " in fails([*words, "--workdir", str(tmp_path)], capfd)


@pytest.mark.slow
def test_a_killed_and_resumed_run_equals_an_uninterrupted_run_bit_for_bit(finished_run, data, tmp_path, capfd):
    workdir = tmp_path / "killed"
    options = ["--train.duration", "12 steps", "--checkpoint.every", "2 steps", "--log.to", "jsonl"]
    arguments = train_words(data, workdir, *options)
    command = [sys.executable, "-m", "jaxddp", *arguments, "--parallel.cpu-devices", "8"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    deadline = time.monotonic() + 200
    while not any((workdir / "checkpoints" / str(step)).is_dir() for step in (2, 4, 6)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    with (workdir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "torn')
    assert main([*arguments, "--resume", "must"]) == 0
    assert "resum" in capfd.readouterr().out
    killed, whole = (
        {line["step"]: (line["loss"], line["top1"]) for line in metrics(place) if line["split"] == "train"}
        for place in (workdir, finished_run)
    )
    steps = [line["step"] for line in metrics(workdir) if line["split"] == "train"]
    assert steps == [*killed] == sorted(killed) and steps[-1] == 12
    assert all(killed[step] == whole[step] for step in killed.keys() & whole.keys())
    ours, theirs = load_parameters(workdir, data), load_parameters(finished_run, data)
    assert largest_difference(ours, theirs) == 0


@pytest.mark.slow
def test_on_resume_a_changed_key_is_rejected_and_a_longer_duration_is_accepted(finished_run, data, tmp_path, capfd):
    workdir = tmp_path / "copy"
    shutil.copytree(finished_run, workdir)
    arguments = train_words(data, workdir, "--train.duration", "12 steps")
    message = fails([*arguments, "--optimizer.learning-rate", "0.3"], capfd)
    assert "--optimizer.learning-rate was 0.005 and is now 0.3" in message
    message = fails([*arguments, "--resume", "never"], capfd)
    assert "step 12" in message and "a new run (--resume never) would lose them" in message
    # A resumed run may change keys of evaluation and of the number of kept checkpoints.
    more = ["--eval.batch-size", "16", "--checkpoint.keep", "1", *PLAIN]
    assert main(train_words(data, workdir, "--train.duration", "14 steps", *more)) == 0
    assert json.loads((workdir / "result.json").read_text())["step"] == 14
    (workdir / "config.json").write_text("{")
    assert "config.json: cannot be read" in fails([*arguments, "--train.duration", "14 steps"], capfd)


def test_the_default_work_directory_is_the_runs_own_or_has_the_name_of_the_config():
    workdirs = {name: str(workdir_of(name)) for name in ("digits", "runs/a/config.json", "recipes/big.json", "b/c.py")}
    assert list(workdirs.values()) == ["runs/digits", "runs/a", "runs/big", "runs/c"]


@pytest.mark.parametrize(
    ("streams", "words", "code", "error"),
    [
        ("<&- >&- 2>&-", ["--version"], 0, ""),
        ("2>&-", ["confi"], 2, ""),
        ("2>/dev/full", ["confi"], 2, ""),
        (">/dev/full", ["--version"], 1, "jaxddp: standard output cannot be written (No space left on device)\n"),
        rare_case(">&-", ["--help"], 0, ""),
        rare_case(">/dev/full 2>&1", ["config", "digits"], 1, ""),
    ],
)
def test_a_command_runs_with_closed_or_full_streams(streams, words, code, error):
    command = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-m", "jaxddp", *words]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (completed.returncode, completed.stderr) == (code, error)


def test_a_stream_that_does_not_block_gets_all_output():
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    writer, text = _Writer(writing, raises=True), bytes(100_000)  # A pipe holds 65,536 bytes.
    threading.Thread(target=lambda: (writer.write(text), os.close(writing))).start()
    with open(reading, "rb") as output:
        assert output.read() == text


def test_a_write_that_ctrl_c_interrupts_is_not_repeated(monkeypatch):
    (reading, writing), write = os.pipe(), _Writer.write
    stream = _replaced(io.TextIOWrapper(io.BytesIO(), "utf-8"), writing, raises=True)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_Writer, "write", lambda *words: write(*words) and signal.raise_signal(signal.SIGINT))
        print("once", file=stream, flush=True)
    stream.flush()
    assert os.read(reading, 100) == b"once\n"


def test_closed_streams_are_opened_and_a_missing_character_is_escaped(tmp_path):
    program = f"""
import os, sys; from jaxddp.command_line.terminal import make_usable
from jaxddp.core.process_exit import end_now, show_stacks_on_signal
make_usable(needs_output=False)
file = open({str(tmp_path / "file")!r}, "w")
print(sys.stdin.read(), "…", file=sys.stderr)
print(file.fileno(), [os.fstat(fd).st_rdev == os.stat(os.devnull).st_rdev for fd in range(3)], file=file)
print([os.get_inheritable(fd) for fd in range(3)], file=file, flush=True)
sys.stdout = sys.stderr = None; show_stacks_on_signal(); end_now("", 7)
"""
    command = ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, "-c", program]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii:strict"}
    completed = subprocess.run(command, stderr=subprocess.PIPE, env=environ, timeout=60)
    assert (completed.returncode, completed.stderr) == (7, b" \\u2026\n")
    number, rest = (tmp_path / "file").read_text().split(maxsplit=1)
    assert int(number) > 2 and rest == "[True, True, False]\n[True, True, True]\n"


@pytest.mark.parametrize("columns", ["²", "9" * 30])
def test_a_value_of_columns_that_is_no_width_is_ignored(columns, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["weights", "timm/resnet18.a1_in1k"]) == 0
    assert "71.50%" in capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "1")  # tyro does not end in a single column.
    assert main(["weights", "--help"]) == 0


SLEEPS = "open({!r}, 'w').close()\n    import time; time.sleep(60)"
WAITS = "import threading, time; threading.Thread(target=time.sleep, args=(70,)).start()"
HIDES = "from jaxddp.config import Config as get_config\ntry:\n    {}\nexcept BaseException: pass"


@pytest.mark.parametrize(
    ("number", "recipe", "code", "line"),
    [
        # Some libraries hide all errors of their imports.
        (signal.SIGTERM, HIDES, 75, "asked to stop"),
        (signal.SIGINT, HIDES, -signal.SIGINT, "interrupted"),
        # C++ code turns an interrupt into another error.
        (signal.SIGHUP, "def get_config():\n  try:\n    {}\n  except BaseException: 1 / 0", 75, "asked to stop"),
        # A thread, such as one in which XLA compiles, does not delay the end.
        ci_case(signal.SIGINT, f"def get_config():\n  if 1:\n    {WAITS}\n    {{}}", -signal.SIGINT, "interrupted"),
        ci_case(signal.SIGTERM, "def get_config():\n  if 1:\n    {}", 75, "asked to stop"),
    ],
)
def test_a_signal_before_training_ends_the_command_with_a_line(number, recipe, code, line, tmp_path):
    file, sign = tmp_path / "waits.py", tmp_path / "sign"
    file.write_text(recipe.format(SLEEPS.format(str(sign))))
    command = [sys.executable, "-m", "jaxddp", "config", str(file)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not sign.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGUSR1)
    time.sleep(0.2)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    stacks, _, last = error.rpartition("jaxddp: ")
    assert (process.returncode, last) == (code, f"{line}; nothing was written\n")
    assert "(most recent call first)" in stacks and "Traceback" not in stacks


def test_an_error_message_includes_errors_during_cleanup(monkeypatch, capfd):
    def interrupt(arguments):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt as error:
            error.add_note("then: x/checkpoints: cannot be written (No space left on device)")
            raise

    monkeypatch.setattr("jaxddp.cli._run", interrupt)
    # Another process cannot time a Ctrl-C to arrive during a failing write.
    assert fails(["train", "digits"], capfd, code=130).endswith(
        "checkpoint, if there is one; then: x/checkpoints: cannot be written (No space left on device)"
    )


@pytest.mark.slow
def test_a_checkpoint_of_another_architecture_is_rejected(finished_run, data, tmp_path, capfd):
    arguments = ["eval", RECIPE, "--data.path", str(data), "--workdir", str(finished_run)]
    message = fails([*arguments, "--model.width", "8"], capfd)
    assert "config.json: --model.width was 4 and is now 8; a checkpoint is evaluated as it was trained" in message
    # Without the run's config.json, `eval` compares the shapes of the arrays.
    shutil.copytree(finished_run / "checkpoints", tmp_path / "checkpoints")
    arguments = ["eval", RECIPE, "--data.path", str(data), "--workdir", str(tmp_path), "--model.width", "8"]
    message = fails(arguments, capfd)
    assert f"{tmp_path}/checkpoints: the checkpoint is of another architecture: " in message
    assert "is [4] in the checkpoint and [8] in the model" in message


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_with_code_1(data, tmp_path, capfd):
    options = ["--train.max-bad-steps", "0", "--lr", "1e6", "--optimizer.weight-decay", "100", "--log.to", "jsonl"]
    options += ["--optimizer.warmup", "0 steps", "--checkpoint.every", "1 step"]
    assert re.search(r"the loss is \S+; .*not saved", fails(train_words(data, tmp_path / "w", *options), capfd, code=1))
    assert json.loads((tmp_path / "w" / "result.json").read_text())["status"] == "failed"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("--train.batch-size 9", "jaxddp: --train.batch-size 9 cannot be divided among 8 devices; 8 or 16"),
        (
            "--train.batch-size 24 --model.batch-norm ghost:2",
            "--model.batch-norm ghost:2 normalizes 2 images together, but --train.batch-size 24 is computed in 8 parts "
            "of 3; a batch of 16, 32, or ghost:1, would do",
        ),
        ("--parallel.devices 9", "--parallel.devices 9: expected 1 to 8"),
        ("--train.duration '0 steps'", "--train.duration '0 steps' is less than one step"),
        ("--optimizer.warmup '90 epochs'", "longer than the run"),
        ("--resume must", "no checkpoint to resume from"),
    ],
)
def test_an_invalid_override_raises_a_one_line_error(overrides, expected, data, tmp_path, capfd):
    assert expected in fails(train_words(data, tmp_path / "w", *shlex.split(overrides)), capfd)


@pytest.mark.parametrize("words", ["train digits --workdir {}", "predict {} b.jpg --out c.csv"])
@pytest.mark.parametrize(
    ("path", "reason"), [("a" * 300, "File name too long"), ("loop/w", "Too many levels of symbolic links")]
)
def test_an_impossible_path_raises_a_one_line_error(words, path, reason, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert f"cannot be used as a path ({reason}); choose another" in fails(words.format(path).split(), capfd)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("tarin digits", "unknown command 'tarin'; did you mean 'train'?"),
        ("validate runs/x", "unknown command 'validate'; did you mean 'eval'?"),
        ("eval", "eval: begin with a run, a recipe or a config; there are: "),
        ("predict", "jaxddp: RUN and --out are missing; see jaxddp predict --help"),
        ("train digits", "jaxddp: no data are given; give --data.path (a folder, a URL or tfds:NAME) or --data.name ("),
        ("train nowhere/digits.py", "did you mean 'digits'?"),
        ("eval digits --workdir /nonexistent/run", "no such work directory"),
        ("probe a b", "jaxddp: the module jaxddp.commands.probe is missing; install jaxddp with its requirements"),
    ],
)
def test_a_wrong_command_config_or_work_directory_raises_a_one_line_error(words, expected, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxddp.commands.probe", None)
    assert expected in fails(words.split(), capfd)


def test_a_mistyped_option_gets_the_nearest_name_as_a_suggestion_on_a_terminal(capfd, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    for option, suggestion in {
        "--optimizer.learing-rate": "--optimizer.learning-rate",
        "--weight-decay": "--optimizer.weight-decay",
        "--optimizer": "--optimizer.name",
        "--every": "--eval.every or --checkpoint.every or --log.every",
        "--work-dir": "--workdir",
        "--gpus": "jaxddp launch --nodes N --gpus K --nr RANK -- train …",
    }.items():
        message = f"jaxddp: Unrecognized options: {option}, 1; perhaps you mean {suggestion}"
        assert fails(["train", "digits", option, "1"], capfd) == f"{message}; see jaxddp train digits --help"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--train.batch-size", "many"], "--train.batch-size many: expected a whole number, 1 to 16,777,216"),
        (["--data.std", "0.2", "x"], "--data.std x: expected a number, 1e-06 to 1"),
        (["--model.stem", "smal"], "--model.stem smal: expected 'imagenet' or 'small' or 'deep', did you mean 'sm"),
        (["--data.augment.flip=maybe"], "--data.augment.flip maybe: expected True or False"),
        (["--epochs", "few"], "--epochs: 'few epochs' is not a duration; write"),
        (["--seed", "\u0661"], "--seed '\u0661': expected a whole number"),
        (["--workdir", ""], "--workdir '': expected a path"),
        (["--workdir", "s3://bucket/run"], "--workdir s3://bucket/run: is a URL, and files are written to this"),
        (["--data.std", "nan", "1", "1"], "--data.std nan: expected"),
        (["--data.crop-area", "1", "0.1"], "--data.crop-area 1.0 0.1: give the smallest share of the image, above 0"),
    ],
)
def test_an_invalid_value_raises_a_one_line_error(words, message, capfd):
    assert fails(["train", "digits", *words], capfd).startswith(f"jaxddp: {message}")


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda row: f",{row}", lambda row: f"../x,{row}"])
def test_invalid_data_raises_a_one_line_error(damage, tmp_path, capfd):
    root = write_tree(tmp_path / "tree", classes=3, images=13, val=3, size=20)
    text = (root / TRAIN).read_text()
    (root / TRAIN).write_text(text + damage(text.splitlines()[1].split(",")[1]) + "\n")
    assert f"{TRAIN}:41" in fails(train_words(root, tmp_path / "w", "--train.duration", "2 steps", *PLAIN), capfd)


def test_help_names_commands_and_configs(capfd):
    assert main(["--help"]) == 0
    text = capfd.readouterr().out
    assert "jaxddp train CONFIG" in text and "imagenet_resnet50" in text
    assert main(["train", "digits", "--help"]) == 0
    assert re.search(r"none\. never: it.*\(default: adamw; there", capfd.readouterr().out, re.DOTALL)
    assert main([]) == 2 and capfd.readouterr().out == text
    assert main(["--version"]) == 0
    assert re.fullmatch(r"jaxddp \S+ \(jax \S+, flax \S+, optax \S+, Python \S+\)\n", capfd.readouterr().out)
