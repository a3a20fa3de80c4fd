"""Checks a long run for leaks: compares memory, open files, threads and disk use of its first and last quarter.

    python benchmarks/whole_runs/soak.py
    python benchmarks/whole_runs/soak.py --door python --steps 2000 --folder /tmp/soak

`jaxddp launch` starts processes that train a small network on 512 small images with the default loggers. They are
sampled every second. A median may grow by 2% from the first to the last quarter of the steps. For counts that fluctuate
(open files, threads of libraries) the minimum may grow by one; for the number of checkpoints the maximum counts. The
first tenth of the steps is ignored, because programs are compiled and modules imported there. Files with a line for
each record (metrics.jsonl, event files, logs, validation.json) grow with the run and are reported per step. `--door
python` trains with `jaxddp.train`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, machine
from benchmarks.common.process_samples import Sample, disk_sample, job_processes, last_step, process_sample

RECIPE = Path(__file__).parents[2] / "tests" / "recipes" / "small_recipe.py"
PYTHON_DOOR = Path(__file__).with_name("soak_python.py")
FLAT = 0.02
WARM_UP = 0.1
SIDE, CLASSES, TRAIN, VAL = 16, 5, 512, 64
PER_STEP = "by the step: "
CHECKPOINTS = "checkpoints: whole", "checkpoints: in the making"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--eval-every", type=int, default=200, help="steps")
    parser.add_argument("--save-every", type=int, default=100, help="steps")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--door", choices=("train", "python"), default="train", help="the command, or jaxddp.train")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between samples")
    parser.add_argument("--limit", type=float, default=3600.0, help="maximum seconds of the run")
    parser.add_argument("--folder", type=Path, help="folder for the run (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/soak.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() if options.folder is None else nullcontext(options.folder) as folder:
        samples = soak(Path(folder), options)
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "steps": options.steps}
    report |= {"rows": compare_quarters(samples, options.steps), "samples": samples}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report) + "\n")
    print(f"results: {options.out}\n\n{table(report['rows'])}")
    sys.exit(1 if "grows" in {row["verdict"] for row in report["rows"].values()} else 0)


# --- Run ---


def soak(folder: Path, options: argparse.Namespace) -> list[Sample]:
    """Train, and sample the job until its end. Exits if the job fails or takes too long."""
    folder.mkdir(parents=True, exist_ok=True)
    data, workdir = write_data(folder / "images.npz"), folder / "run"
    output = (folder / "output").open("wb")
    launch = ["-m", "jaxddp", "launch", "--processes", str(options.processes), "--gpus", "0"]
    command = [sys.executable, *launch, "--logs", str(workdir / "logs"), "--", *program(data, workdir, options)]
    with (
        output,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT) as launcher,
    ):
        try:
            samples = sample(launcher, workdir, options)
        finally:
            launcher.terminate()
            with suppress(subprocess.TimeoutExpired):
                launcher.wait(60)
            launcher.kill()
    if launcher.returncode or last_step(workdir) != options.steps:
        sys.exit(
            f"the run ended with exit code {launcher.returncode} at step {last_step(workdir)}: {folder / 'output'}"
        )
    return samples


def program(data: Path, workdir: Path, options: argparse.Namespace) -> list[str]:
    """Return the command of each process."""
    every = {name: f"{getattr(options, f'{name}_every')} steps" for name in ("log", "eval", "save")}
    if options.door == "python":
        return ["python", str(PYTHON_DOOR), str(data), str(workdir), str(options.steps), json.dumps(every)]
    return [
        *("train", str(RECIPE), "--data.path", str(data), "--workdir", str(workdir)),
        *("--train.duration", f"{options.steps} steps", "--log.to", "jsonl,curves,parameters,tensorboard"),
        *("--log.every", every["log"], "--eval.every", every["eval"], "--checkpoint.every", every["save"]),
    ]


def write_data(file: Path) -> Path:
    """Write two splits of small images, the same at each call."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", TRAIN), ("val", VAL)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
        arrays[f"{split}_labels"] = np.arange(count) % CLASSES
    np.savez(file, **arrays)
    return file


def sample(launcher: subprocess.Popen[bytes], workdir: Path, options: argparse.Namespace) -> list[Sample]:
    begin, samples = time.monotonic(), list[Sample]()
    while launcher.poll() is None and time.monotonic() - begin < options.limit:
        taken: Sample = {"seconds": time.monotonic() - begin, "step": last_step(workdir)}
        # A process that starts or ends during a sample is skipped.
        with suppress(OSError):
            for who, pid in job_processes(launcher.pid).items():
                taken |= {f"{who}: {quantity}": value for quantity, value in process_sample(pid).items()}
            samples.append(taken | disk_sample(workdir))
        time.sleep(options.interval)
    return samples


# --- Quarters ---


def compare_quarters(samples: Sequence[Sample], steps: int) -> dict[str, Figures]:
    """Compare the first and the last quarter of a run.

    Returns:
        By quantity, the statistics of both quarters, their ratio and a verdict. A quantity "by the step" is its growth
        per step, and has no verdict.
    """
    # Some processes end at the last step.
    warm = [each for each in samples if WARM_UP * steps <= each["step"] < steps]
    length = (1 - WARM_UP) * steps / 4
    first = [each for each in warm if each["step"] <= WARM_UP * steps + length]
    last = [each for each in warm if each["step"] >= steps - length]
    if min(len(first), len(last)) < 3:
        sys.exit(f"{len(first)} and {len(last)} samples of both quarters are too few; give more --steps")
    rows = {}
    for name in first[0]:
        if name not in ("seconds", "step", "records: MB") and not name.endswith("CPU seconds"):
            rows[name] = add_verdict(name, row([each[name] for each in first], [each[name] for each in last]))
    for name in ("seconds", *(name for name in first[0] if name.endswith("CPU seconds")), "records: MB"):
        rates = [rate(quarter, name) for quarter in (first, last)]
        rows[PER_STEP + name] = row(rates[:1], rates[1:]) | {"verdict": ""}
    return rows


def rate(quarter: Sequence[Sample], name: str) -> float:
    begin, end = quarter[0], quarter[-1]
    return (end[name] - begin[name]) / (end["step"] - begin["step"])


def row(first: Sequence[float], last: Sequence[float]) -> Figures:
    kinds = {"least": min, "median": statistics.median, "most": max}
    results: Figures = {kind: [of(first), of(last)] for kind, of in kinds.items()}
    return results | {"ratio": ratio(*results["median"])}


def add_verdict(name: str, results: Figures) -> Figures:
    """Add the verdict by the rules in the module's docstring."""
    comes_and_goes = name.endswith(("open files", "threads"))
    first, last = results["most" if name in CHECKPOINTS else "least" if comes_and_goes else "median"]
    allowed = max(FLAT * first, 1 if comes_and_goes else 0)
    verdict = "flat" if abs(last - first) <= allowed else "falls" if last < first else "grows"
    return results | {"ratio": ratio(first, last), "verdict": verdict}


def ratio(base: float, value: float) -> float:
    return value / base if base else 1.0 if value == 0 else float("inf")


def table(rows: dict[str, Figures]) -> str:
    kinds, title = ("least", "median", "most"), "first and last quarter"
    lines = [f"{title:<36}" + "".join(f"{kind:>20}" for kind in kinds) + f"{'ratio':>9}"]
    for name, results in rows.items():
        values = "".join("".join(f"{value:>10,.4g}" for value in results[kind]) for kind in kinds)
        lines.append(f"{name:<36}{values}{results['ratio']:>9.3f}  {results['verdict']}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    main()
