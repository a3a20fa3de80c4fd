"""Completion in real shells, with the scripts that `jaxddp completion` prints."""

import os
import re
import shutil
import subprocess
import sys

import pexpect
import pytest

from jaxddp.cli import COMMANDS, main
from jaxddp.recipe.sources import config_names

CASES = [
    ("", COMMANDS),
    ("tr", ["train"]),
    ("train cifar10_f", ["cifar10_fast", "cifar10_fast_sgd"]),
    ("train runs/", ["runs/first"]),
    ("train ", [*config_names(), "runs/first"]),
    ("eval runs/fi", ["runs/first"]),
    ("train digits --train.batch", ["--train.batch-size"]),
    ("train digits --ep", ["--epochs"]),
    ("train digits --resume ", ["auto", "must", "never"]),
    ("train digits --data.augment.flip f", ["false"]),
    ("train digits --optimizer.name l", ["lamb", "lars"]),
    ("train digits --model vit_t", ["vit_ti16"]),
    ("train digits --seed 3 --loss.name b", ["bce"]),
    ("config digits --format ", ["json", "table", "yaml"]),
    ("export runs/first --format o", ["onnx"]),
    ("data ch", ["check"]),
    ("data get ci", ["cifar10", "cifar100"]),
    ("data show dig", ["digits", "digits_fixmatch"]),
    ("launch --processes 2 -- tr", ["train"]),
    ("launch --processes 2 -- train imagenet_v", ["imagenet_vit_s16"]),
    ("checkpoints runs/first --ve", ["--verify"]),
    ("train digits --data ru", ["runs"]),
    ("completion z", ["zsh"]),
    ("sweep digits --optimizer.learning", ["--optimizer.learning-rate"]),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the current directory, which contains a run and a folder that is none."""
    for name in ("first", "empty"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs/first/config.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def script_of(shell: str, capsys, folder) -> str:
    """Write the script of a shell, and return its path."""
    assert main(["completion", shell]) == 0
    path = folder / f"jaxddp.{shell}"
    path.write_text(capsys.readouterr().out)
    return str(path)


def test_bash_completes_the_words_of_a_command(capsys, folder):
    lines = [f"source {script_of('bash', capsys, folder)}"]
    for line, _ in CASES:
        words = ["jaxddp", *line.split(" ")]
        lines += [f"COMP_WORDS=({' '.join(map(repr, words))})", f"COMP_CWORD={len(words) - 1}", "_jaxddp"]
        lines += ['printf "%s " "${COMPREPLY[@]}"; echo']
    done = subprocess.run(["bash", "--norc"], input="\n".join(lines), capture_output=True, text=True, check=True)
    assert done.stderr == ""
    found = [line.split() for line in done.stdout.splitlines()]
    for (line, expected), words in zip(CASES, found, strict=True):
        files = [] if line != "train " else ["runs", "jaxddp.bash"]
        others = [word for word in words if word not in files]
        assert sorted({*others} - {"runs/empty"}) == sorted(expected), line


@pytest.mark.parametrize(("shell", "quiet"), [("bash", "--norc"), pytest.param("zsh", "-f", marks=pytest.mark.ci)])
def test_a_tab_in_a_terminal_completes_the_line(shell, quiet, capsys, folder):
    if shutil.which(shell) is None:
        assert "CI" not in os.environ, f"{shell} is missing; .ci/run installs it"
        pytest.skip(f"no {shell} here: apt-get install {shell}")
    script = script_of(shell, capsys, folder)
    environ = {"PATH": os.environ["PATH"], "TERM": "dumb", "PS1": "> ", "HOME": str(folder), "HISTFILE": "/dev/null"}
    terminal = pexpect.spawn(shell, [quiet, "-i"], env=environ, encoding="utf8", timeout=20, dimensions=(40, 160))
    if shell == "zsh":
        terminal.sendline("PS1='> '; autoload -Uz compinit && compinit -u -D")
    # The command prints its arguments.
    terminal.sendline(f'jaxddp() {{ echo "words:" "$@" :end; }}; source {script}; echo rea\'\'dy')
    terminal.expect("ready")
    for typed, completed in (
        ("tra\tdigits_f\t", "train digits_fixmatch"),
        ("eval runs/f\t", "eval runs/first"),
        ("train digits --train.dur\t3", "train digits --train.duration 3"),
        ("train digits --optimizer.name ad\t", "train digits --optimizer.name adamw"),
        ("train digits --optimizer.name=ad\t", "train digits --optimizer.name=adamw"),
    ):
        terminal.sendline(f"jaxddp {typed}")
        terminal.expect(r"words: (.*) :end\r?\n")
        assert terminal.match[1].replace("/ ", " ").rstrip("/ ") == completed
    terminal.close(force=True)


def test_a_script_is_printed_without_jax():
    program = "import sys; from jaxddp.cli import main; main(['completion', 'bash']); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Every option of `train` with a list of values has its words.
    assert re.search(r"\*' --data\.crop'\) printf '%s\\n' random_area whole ;;", done.stdout)


def test_an_unknown_shell_is_an_error(capsys):
    assert main(["completion", "fish"]) == 2
    assert capsys.readouterr().err.startswith("jaxddp: invalid choice 'fish' for argument 'shell'")
