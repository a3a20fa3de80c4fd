"""Write the files of a release beside the wheel, from finished runs: `python .ci/release.py dist runs/mine …`.

Each run becomes an archive, `NAME.tar.gz`, of its published files (weights, settings, classes, a model card, curves),
its checkpoints and its metrics. Unpacked, it is a work directory. Only the files in which Orbax marks a checkpoint as
complete name the folder of the run. `NAME.stablehlo` and `NAME.onnx` are the network as a program. `SHA256SUMS` lists
all files.
"""

import gzip
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

from jaxddp.cli import main as jaxddp
from jaxddp.data.storage.web import sha256_of
from jaxddp.recipe.sources import CONFIG_FILE
from jaxddp.weights.places import is_local

KEPT_FILES = ("checkpoints", "recipe", "metrics.jsonl", "result.json")
PROGRAMS = ("stablehlo", "onnx")
SUMS = "SHA256SUMS"


def main(words: list[str]) -> None:
    if len(words) < 2:
        sys.exit("release.py: give a folder, and the work directory of each run")
    dist, *runs = (Path(word).absolute() for word in words)
    names = [run.name for run in runs]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        sys.exit(f"release.py: two runs are called {repeated}; rename the folder of one")
    dist.mkdir(parents=True, exist_ok=True)
    for run in runs:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / run.name
            export(run, folder, "--format", "hub")
            complete(folder, run)
            pack(folder, dist / f"{run.name}.tar.gz", int((run / CONFIG_FILE).stat().st_mtime))
        for program in PROGRAMS:
            export(run, dist / f"{run.name}.{program}")
    write_sums(dist)


def export(run: Path, out: Path, *options: str) -> None:
    if code := jaxddp(["export", str(run), "--out", str(out), *options]):
        sys.exit(code)


def complete(folder: Path, run: Path) -> None:
    """Add the files that continue, evaluate and compare a run to its published files."""
    for name in KEPT_FILES:
        if (run / name).is_dir():
            shutil.copytree(run / name, folder / name)
        elif (run / name).is_file():
            shutil.copyfile(run / name, folder / name)
    # The run's config.json also has the digests that a resumed run compares. The published settings have no paths. They
    # lack the settings of a network that Python code defines, of which only the weights may be a path.
    config, published = (json.loads((place / CONFIG_FILE).read_text()) for place in (run, folder))
    config |= {section: values for section, values in published.items() if isinstance(values, dict)}
    if (weights := config.get("model", {}).get("weights")) and is_local(weights):
        config["model"]["weights"] = None
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")


def pack(folder: Path, target: Path, modified: int) -> None:
    """Write a .tar.gz file of a folder, without owners. All members get the time `modified`."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
        member.mode = 0o755 if member.isdir() else 0o644
        member.mtime = modified
        return member

    unfinished = target.with_name(f"{target.name}.part")
    with gzip.GzipFile(unfinished, "wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for path in (folder, *sorted(folder.rglob("*"))):
            archive.add(path, path.relative_to(folder.parent), recursive=False, filter=anonymous)
    os.replace(unfinished, target)


def write_sums(dist: Path) -> None:
    """Write the SHA-256 of every file in the format of `sha256sum --check`."""
    files = sorted(path for path in dist.iterdir() if path.is_file() and path.name != SUMS)
    lines = [f"{sha256_of(path)}  {path.name}\n" for path in files]
    (dist / SUMS).write_text("".join(lines))
    print("".join(lines), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
