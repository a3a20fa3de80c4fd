"""Breaks the package on purpose, one mutant at a time, and checks that the tests fail.

    python benchmarks/mutants.py [LIST] [--list] [--sample N --seed S] [--jobs 2]

A mutant in `benchmarks/mutants/LIST.toml` has a file, a line of the file, the broken line, and the tests that must
fail. The script applies a mutant to a copy of the working tree and runs its tests there. A test that hangs counts as
failed. Before, the tests must pass in an unchanged copy. The script prints a line for each mutant: killed or survived,
seconds and file. The exit code is 1 if a mutant survived, and 2 if a list is wrong or a test fails without a mutant.
"""

import argparse
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
LISTS = Path(__file__).parent / "mutants"
HANGING_SECONDS = 180
"""Seconds after which the tests of a mutant count as hanging."""
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["conftest", "flax.linen", "optax", "orbax.checkpoint", "tensorflow", "PIL.Image"])
"""Modules that take seconds to import, after the JAX settings of the tests."""
NOT_RUN = (2, 3, 4, 5)
"""Pytest's exit codes for an interrupt, an internal error, wrong usage, and no tests."""


@dataclass(frozen=True)
class Mutant:
    """A change of one or several lines of a file, and the tests that must fail because of it.

    Attributes:
        of_list: the name of the list.
        promise: the promise that the mutant breaks: 1, N devices equal one; 2, each example exactly once in an epoch;
            3, exact evaluation; 4, exact resuming; 5, the recipe does not depend on the devices; 6, no endless wait;
            7, one line for bad input; 0, none of these.
    """

    of_list: str
    file: str
    line: str
    broken: str
    tests: tuple[str, ...]
    promise: int = 0

    def __str__(self) -> str:
        promise = f" [promise {self.promise}]" if self.promise else ""
        return f"{self.of_list}{promise} {self.file}: {shorten(self.line)} -> {shorten(self.broken)}"

    def apply_to(self, source: str) -> str:
        """Return the broken source. Raises ValueError if the line does not occur exactly once."""
        count = source.count(self.line)
        if count != 1:
            raise ValueError(f"{self.file}: {shorten(self.line)} occurs {count} times instead of once")
        if self.broken == self.line:
            raise ValueError(f"{self.file}: {shorten(self.line)} is not changed")
        return source.replace(self.line, self.broken)


def shorten(text: str) -> str:
    """Join lines to one line that is short enough for a table."""
    return repr(" ".join(text.split())[:90])


def mutants(names: Sequence[str] = ()) -> list[Mutant]:
    """Read the mutants of some lists, or of all. Raises ValueError for an unknown list."""
    files = {file.stem: file for file in sorted(LISTS.glob("*.toml"))}
    unknown = [name for name in names if name not in files]
    if unknown:
        raise ValueError(f"no list of mutants for {unknown[0]!r}; there are {', '.join(files)}")
    return [
        Mutant(name, **entry | {"tests": tuple(entry["tests"])})
        for name, file in files.items()
        if name in (names or files)
        for entry in tomllib.loads(file.read_text())["mutant"]
    ]


def copy_tree(to: Path) -> Path:
    """Copy the working tree without the files that git ignores."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)
    return to


def run_tests(
    tree: Path, tests: Sequence[str], *options: str, seconds: float = HANGING_SECONDS
) -> tuple[int | None, str]:
    """Run tests. Returns pytest's exit code, or None if pytest hangs, and the output."""
    with tempfile.NamedTemporaryFile("r", errors="replace") as printed:
        child = FORKS.Process(target=_pytest, args=(tree, [*options, *tests], printed.name))
        child.start()
        child.join(seconds)
        if hangs := child.is_alive():
            os.killpg(child.pid or 0, signal.SIGKILL)
            child.join()
        return None if hangs else child.exitcode, printed.read()


def _pytest(tree: Path, words: Sequence[str], printed: str) -> None:
    """Run pytest on a copy, in a forked process that has already imported JAX. Its children end with it."""
    os.setsid()
    os.chdir(tree)
    with open(printed, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for name in [name for name in sys.modules if name.split(".")[0] in ("conftest", "support", "jaxddp", "benchmarks")]:
        del sys.modules[name]
    sys.path[:0] = [str(tree)]
    os.environ["PYTHONPATH"] = str(tree)
    # Python matches a compiled file to its source by modification time in seconds and by size, which two mutants of a
    # file may share.
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    # More examples than usual, so that a mutant is not killed by luck.
    hypothesis.settings.register_profile("mutants", deadline=None, max_examples=200)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--hypothesis-profile", "mutants", *words]))


def try_mutant(mutant: Mutant, tree: Path) -> str:
    """Test a mutant in a copy, and restore the copy. Returns "killed", "killed (hangs)" or "SURVIVED"."""
    file = tree / mutant.file
    source = file.read_text()
    file.write_text(mutant.apply_to(source))
    try:
        code, printed = run_tests(tree, mutant.tests, "-x", "--timeout", str(HANGING_SECONDS))
    finally:
        file.write_text(source)
    if code in NOT_RUN:
        raise ValueError(f"{mutant}: no test ran\n{printed}")
    return {None: "killed (hangs)", 0: "SURVIVED"}.get(code, "killed")


def run(chosen: Sequence[Mutant], jobs: int) -> list[str]:
    """Try mutants, `jobs` at a time, and print a line for each. Raises like `try_mutant` and `check`."""
    # The fork server imports `conftest` from here.
    os.environ["PYTHONPATH"] = str(ROOT / "tests")
    # Otherwise TensorFlow's import writes to stderr, whatever its log level.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    with tempfile.TemporaryDirectory(prefix="jaxddp-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: Queue[Path] = Queue()
        for number in range(jobs):
            trees.put(copy_tree(Path(folder) / str(number)))

        def try_timed(mutant: Mutant) -> str:
            tree, start = trees.get(), time.monotonic()
            try:
                fate = try_mutant(mutant, tree)
            finally:
                trees.put(tree)
            print(f"{fate:14} {time.monotonic() - start:5.1f} s  {mutant}", flush=True)
            return fate

        tests, began = sorted({test for mutant in chosen for test in mutant.tests}), time.monotonic()
        parts = [(Path(folder) / str(number), tests[number::jobs]) for number in range(jobs)]
        list(pool.map(lambda part: check(*part), parts))
        print(f"{len(tests)} tests pass without a mutant, {time.monotonic() - began:.0f} s", flush=True)
        return list(pool.map(try_timed, chosen))


def check(tree: Path, tests: Sequence[str]) -> None:
    """Raise ValueError if a test fails without a mutant."""
    if tests:
        code, printed = run_tests(tree, tests, seconds=HANGING_SECONDS * len(tests))
        if code != 0:
            raise ValueError(f"the tests do not pass without a mutant\n{printed}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("lists", nargs="*", metavar="LIST", help="lists to try (default: all)")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--sample", type=int, metavar="N", help="try N random mutants")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time")
    options = parser.parse_args()
    try:
        chosen = mutants(options.lists)
        for mutant in chosen:
            mutant.apply_to((ROOT / mutant.file).read_text())
        if options.sample is not None:
            chosen = random.Random(options.seed).sample(chosen, min(options.sample, len(chosen)))
        if options.list:
            print("\n".join(map(str, chosen)))
            return 0
        fates = run(chosen, options.jobs)
    except (ValueError, OSError) as error:
        print(f"mutants: {error}", file=sys.stderr)
        return 2
    survivors = fates.count("SURVIVED")
    print(f"{len(fates) - survivors} killed, {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
