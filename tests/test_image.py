"""The container image: its build has the files that it needs, and leaves out all others."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from support.pages import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
SCRIPTS = [path for path in sorted((ROOT / "launch").iterdir()) if path.is_file()]
MANIFESTS = [path for path in SCRIPTS if "jaxddp:latest" in path.read_text()]
TIMEOUT_S = 120


def copied() -> list[str]:
    """Return the files and folders that the build copies from the checkout."""
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
    return [place for line in lines for place in line.split()]


def test_docker_sends_only_the_files_that_the_build_copies():
    excluded, *kept = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] not in "#"]
    assert excluded == "*" and kept.pop() == "**/__pycache__"
    assert sorted(kept) == sorted(f"!{place}" for place in copied())


@pytest.mark.ci
def test_the_copied_files_build_the_same_wheel_as_the_checkout(tmp_path):
    source = tmp_path / "source"
    for place in map(Path, copied()):
        copy = shutil.copytree if (ROOT / place).is_dir() else shutil.copy
        (source / place).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / place, source / place)
    names = []
    for number, folder in enumerate((source, ROOT)):
        build = ["hatchling", "build", "--target", "wheel", "--directory", tmp_path / str(number)]
        command = [sys.executable, "-m", *build]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=TIMEOUT_S)
        (wheel,) = (tmp_path / str(number)).glob("*.whl")
        with ZipFile(wheel) as content:
            names.append(sorted(name for name in content.namelist() if "__pycache__" not in name))
    assert names[0] == names[1] and "jaxddp/configs/digits.py" in names[0]


@pytest.mark.parametrize("manifest", [path.name for path in MANIFESTS])
def test_the_containers_of_a_manifest_name_the_program(manifest):
    """Without an entry point, `command` of Kubernetes and of AWS Batch mean the same: the whole command."""
    assert "ENTRYPOINT" not in DOCKERFILE and 'CMD ["jaxddp", "--help"]' in DOCKERFILE
    text = (ROOT / "launch" / manifest).read_text()
    documents = [json.loads(text)] if manifest.endswith(".json") else [*yaml.safe_load_all(text)]
    commands = _commands(documents)
    assert commands and {command[0] for command in commands} == {"jaxddp"}


def _commands(value: object) -> list[list[str]]:
    """Return the commands of all containers in a manifest."""
    if isinstance(value, dict):
        own = [value["command"]] if "command" in value else []
        return own + [command for part in value.values() for command in _commands(part)]
    return [command for part in value for command in _commands(part)] if isinstance(value, list) else []
