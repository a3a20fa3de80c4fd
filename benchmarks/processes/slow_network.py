"""Measures training over a slow network: an average of gradients in each step, or of parameters every H steps.

    jaxddp data sample digits --out data/digits
    python benchmarks/processes/slow_network.py data/digits

Two processes in two network namespaces train the digits, one device each. Between them is a link of 100 Mbit/s and
50 ms in each direction (`slow_link.py`). The contenders take turns. The speed of a turn is that of its records after
the first one, which includes compilation. Then each contender trains the digits to the end with several seeds, as two
groups of one device in one process, because the network has no effect on the accuracy. Needs Linux and root.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.common.harness import Figures, alternate, machine
from benchmarks.faults.hosts import Cable, ip

ROOT = Path(__file__).parents[2]
PORT, BATCH = 7171, 32
TURN_SECONDS = 600
CORES = sorted(os.sched_getaffinity(0))
NESTEROV = ["--train.outer-optimizer", "nesterov"]
CONTENDERS: dict[str, list[str]] = {
    "synchronous": [],
    "H = 10": ["--train.sync-every", "10 steps"],
    "H = 50": ["--train.sync-every", "50 steps"],
    "H = 50, Nesterov": ["--train.sync-every", "50 steps", *NESTEROV],
}
QUIET = [
    "--parallel.heartbeat-timeout",
    "120",
    "--eval.every",
    "0 steps",
    "--checkpoint.every",
    "0 steps",
    "--log.to",
    "jsonl",
    "--log.every",
    "50 steps",
]


class SlowCable(Cable):
    """Two network namespaces that are joined by a slow link."""

    def __init__(self, rate: float, delay: float) -> None:
        """Args: rate: bits a second; delay: seconds. Both are of each direction."""
        super().__init__()
        self._options = ["--rate", str(rate), "--delay", str(delay)]
        self._link: subprocess.Popen[str] | None = None

    def _connect(self) -> None:
        devices = [f"slow-{os.getpid() % 100_000}-{end}" for end in "ab"]
        command = [sys.executable, str(Path(__file__).with_name("slow_link.py")), *devices, *self._options]
        self._link = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._link.stdout is not None
        if self._link.stdout.readline() != "ready\n":
            raise RuntimeError("the slow link did not start")
        for host, device, own, other in zip(self.hosts, devices, self.addresses, self.addresses[::-1], strict=True):
            ip("link", "set", device, "netns", host)
            ip("-n", host, "address", "add", own, "peer", other, "dev", device)
            # Long packets cost the emulator less time.
            ip("-n", host, "link", "set", device, "mtu", "9000", "up")
            ip("-n", host, "link", "set", "lo", "up")

    def __exit__(self, *_: object) -> None:
        if self._link is not None:
            self._link.kill()
            self._link.wait()
        super().__exit__()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder of the digits")
    parser.add_argument("--rate", type=float, default=1e8, help="bits a second")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds in each direction")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender; 0 measures no speed")
    parser.add_argument("--steps", type=int, default=150, help="steps of a turn")
    parser.add_argument("--seeds", type=int, default=3, help="runs to the end of each contender; 0 for none")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks/slow_network.json"))
    options = parser.parse_args()
    report: Figures = {"command": " ".join(["python", *sys.argv]), "machine": machine(), "load": [os.getloadavg()]}
    if options.rounds:
        with SlowCable(options.rate, options.delay) as cable:
            turns = {name: speed_of(cable, options.data, options.steps, words) for name, words in CONTENDERS.items()}
            speeds = alternate(turns, options.rounds)
        report["images_per_second"] = {name: summary(values) for name, values in speeds.items()}
    report["top1"] = {
        name: [accuracy(options.data, seed, words) for seed in range(options.seeds)]
        for name, words in CONTENDERS.items()
    }
    report["load"].append(os.getloadavg())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))


def summary(values: Sequence[float]) -> Figures:
    return {"median": statistics.median(values), "turns": list(values)}


def speed_of(cable: Cable, data: Path, steps: int, words: list[str]) -> Callable[[], float]:
    """Return a function that trains over the link, and returns the images a second of both processes together."""

    def turn() -> float:
        with tempfile.TemporaryDirectory() as folder:
            workdir = Path(folder) / "run"
            command = train_words(data, workdir, ["--train.duration", f"{steps} steps", *QUIET, *words])
            children = [start(cable, process, command) for process in range(2)]
            try:
                codes = [child.wait(TURN_SECONDS) for child in children]
            finally:
                for child in children:
                    child.kill()
            if any(codes):
                raise RuntimeError(f"the processes ended with exit codes {codes}")
            return images_per_second(workdir / "metrics.jsonl")

    return turn


def start(cable: Cable, process: int, command: list[str]) -> "subprocess.Popen[bytes]":
    job = {"JAX_COORDINATOR_ADDRESS": f"{cable.addresses[0]}:{PORT}", "JAX_NUM_PROCESSES": "2"}
    # One core each, as in `scale.py`.
    pinned = ["taskset", "--cpu-list", str(CORES[process % len(CORES)])]
    environ = {**os.environ, **job, "JAX_PROCESS_ID": str(process), "JAX_PLATFORMS": "cpu"}
    words = ["ip", "netns", "exec", cable.hosts[process], *pinned, *command]
    return subprocess.Popen(words, env=environ, cwd=ROOT, stdout=subprocess.DEVNULL)


def images_per_second(metrics: Path) -> float:
    """Return the mean speed over the records after the first one."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    records = [line for line in lines if line["split"] == "train"]
    seconds, images = 0.0, 0
    for before, record in itertools.pairwise(records):
        count = BATCH * (record["step"] - before["step"])
        images, seconds = images + count, seconds + count / record["images_per_second"]
    return images / seconds


def accuracy(data: Path, seed: int, words: list[str]) -> float:
    """Return the top-1 accuracy of a whole run."""
    groups = ["--parallel.groups", "2"] if words else []
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder) / "run"
        more = [
            "--parallel.cpu-devices",
            "2",
            "--seed",
            str(seed),
            "--log.to",
            "jsonl",
            "--checkpoint.every",
            "0 steps",
        ]
        subprocess.run(train_words(data, workdir, [*more, *groups, *words]), cwd=ROOT, check=True, capture_output=True)
        return json.loads((workdir / "result.json").read_text())["val"]["top1"]


def train_words(data: Path, workdir: Path, more: list[str]) -> list[str]:
    words = ["--data.path", str(data.absolute()), "--workdir", str(workdir), *more]
    return [sys.executable, "-m", "jaxddp", "train", "digits", *words]


def table(report: Figures) -> str:
    lines = [f"{'contender':<20}{'images/s':>10}{'turns':>24}   top-1"]
    for name in CONTENDERS:
        speed = report.get("images_per_second", {}).get(name, {"median": float("nan"), "turns": []})
        turns = ", ".join(f"{each:.1f}" for each in speed["turns"])
        accuracies = ", ".join(f"{each:.2%}" for each in report["top1"][name])
        lines.append(f"{name:<20}{speed['median']:>10.1f}{turns:>24}   {accuracies}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
