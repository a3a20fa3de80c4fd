"""Injects faults at random moments, and checks that a job behaves as promised and ends with the same bits.

    python benchmarks/chaos.py --kills 50 --seed 0
    python benchmarks/chaos.py --kills 50 --seed 0 --only "cable pulled"
    python benchmarks/chaos.py --kills 50 --seed 0 --number 17

Two processes train a small network for 60 steps, with a validation and a checkpoint every 10 steps. They run on one
host, on two hosts (network namespaces), or read their images from a web server. A fault kills, stops, terminates or
restarts a process, a launcher or a host, pulls a cable, fills a disk, removes a work directory, or stops the server. It
comes at a random moment of the start, the compilation, a step, a save, a validation, the end, or a restart. Then the
script starts the run again, as a user would, until it is done. Its checkpoints, metrics.jsonl and validations must
equal those of an undisturbed run bit for bit, except times. The same seed draws the same faults and moments.

For a broken promise the script prints the folder that keeps the run and all logs, and the exit code is 1. Without root
the script skips the faults that need root (namespaces, separate file systems), and prints their names.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.common.harness import Figures, machine
from benchmarks.faults.outcomes import Outcome
from benchmarks.faults.promises import FAULTS, NEED_ROOT, Fault
from benchmarks.faults.scenario import Scenario, draw, is_root, run_scenario, run_undisturbed

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from support.ilsvrc import write_tree  # pyright: ignore[reportMissingImports]: the line above

SIDE, CLASSES, TRAIN, VAL = 16, 5, 200, 400
WIDTH = max(map(len, FAULTS)) + 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=[*FAULTS], help="run only these faults")
    parser.add_argument("--number", type=int, nargs="+", help="run only the scenarios with these numbers")
    parser.add_argument("--folder", type=Path, help="for runs and logs (default: a temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/chaos.json"))
    options = parser.parse_args()
    scenarios = [each for each in draw(options.seed, options.kills, injectable_faults()) if each.fault in options.only]
    scenarios = [each for each in scenarios if options.number is None or each.number in options.number]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="jaxddp-chaos-"))
    begin = time.monotonic()
    results = run_all(scenarios, folder)
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "found": results}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    num_kept = sum(is_promise_kept(each) for each in results)
    print(f"results: {options.out}\n\n{table(results)}")
    minutes = (time.monotonic() - begin) / 60
    print(f"{num_kept} of {len(results)} jobs behaved as promised, with identical results, in {minutes:.0f} minutes")
    if num_kept == len(results):
        shutil.rmtree(folder)
    sys.exit(0 if num_kept == len(results) else 1)


def injectable_faults() -> dict[str, Fault]:
    """Return the faults that this user can inject."""
    if is_root():
        return FAULTS
    print(f"skipped, because this user is not root: {', '.join(NEED_ROOT)}, and every fault in jobs on two hosts")
    without_root = {name: fault for name, fault in FAULTS.items() if name not in NEED_ROOT}
    return {
        name: Fault(
            fault.strike,
            fault.promise,
            tuple(place for place in fault.places if place != "hosts"),
            fault.moments,
            fault.passes,
            fault.options,
        )
        for name, fault in without_root.items()
    }


def run_all(scenarios: list[Scenario], folder: Path) -> list[Figures]:
    """Run all scenarios in turn. The files of a scenario that kept its promise are deleted."""
    data, references, results = write_data(folder), dict[str, Outcome](), list[Figures]()
    for scenario in scenarios:
        place, cache = scenario.place, folder / "programs"
        if place not in references:
            references[place] = run_undisturbed(place, empty_folder(folder / f"undisturbed-{place}"), data, cache)
        logs = empty_folder(folder / f"{scenario.seed}-{scenario.number}")
        result = {"number": scenario.number, "seed": scenario.seed}
        result |= run_scenario(scenario, logs, data, cache, references[place])
        results.append(result)
        print(f"{scenario}: {summary(result)}", flush=True)
        if is_promise_kept(result):
            shutil.rmtree(logs)
        else:
            print(f"     logs: {logs}; to repeat: --seed {scenario.seed} --number {scenario.number}", flush=True)
    return results


def empty_folder(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_data(folder: Path) -> dict[str, Path]:
    """Write small images as arrays, and as a tree of files for the web server."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", TRAIN), ("val", VAL)):
        arrays[f"{split}_images"] = rng.integers(0, 256, (count, SIDE, SIDE, 3), np.uint8)
        arrays[f"{split}_labels"] = np.arange(count) % CLASSES
    np.savez(folder / "images.npz", **arrays)
    tree = write_tree(folder / "tree", classes=CLASSES, images=TRAIN // CLASSES, val=VAL // 4, size=SIDE)
    return {"arrays": folder / "images.npz", "tree": tree}


# --- Results ---


def is_promise_kept(result: Figures) -> bool:
    return not result["broken"] and not result.get("differs")


def summary(result: Figures) -> str:
    if not is_promise_kept(result):
        return f"BROKEN PROMISE: {result['broken'] or result['differs']}"
    moment = f"struck at step {result['step']}" if result["came"] else "the fault came too late"
    return f"{moment}, ended with {result['codes']} after {result['seconds']:.1f} s, identical"


def table(results: list[Figures]) -> str:
    """Format a row for each fault: the counts of injections, kept promises and identical results, and the seconds until
    a message named the fault and until all processes ended.
    """
    by_fault = defaultdict[str, list[Figures]](list)
    for each in results:
        by_fault[each["fault"]].append(each)
    columns = f"{'times':>6}{'struck':>8}{'as promised':>13}{'identical':>11}{'named, s':>13}{'ended, s':>13}"
    lines = [f"{'fault':<{WIDTH}}{columns}"]
    for name, group in sorted(by_fault.items()):
        # A job that continues has no end time.
        failures = [each for each in group if each.get("came") and any(each["codes"])]
        to_message = seconds([each["named"] for each in failures if each["named"] is not None])
        to_end = seconds([each["seconds"] for each in failures]) or "goes on"
        num_kept = sum(not each["broken"] for each in group)
        identical = sum(each.get("differs") == "" for each in group)
        struck = sum(bool(each.get("came")) for each in group)
        lines.append(
            f"{name:<{WIDTH}}{len(group):>6}{struck:>8}{num_kept:>13}{identical:>11}{to_message:>13}{to_end:>13}"
        )
    return "\n".join(lines)


def seconds(results: list[float]) -> str:
    """Format the median and the maximum."""
    return f"{statistics.median(results):.1f}, {max(results):.1f}" if results else ""


if __name__ == "__main__":
    main()
