"""`benchmarks/whole_runs/soak.py`: verdicts on samples, and samples of a process and of a work directory."""

from pathlib import Path

import pytest

from benchmarks.common import process_samples
from benchmarks.whole_runs import soak

STEPS = 1000


def make_samples(grows: float = 0.0, adds: int = 0) -> list[process_samples.Sample]:
    """Return samples of 1,000 steps in which memory and open files grow by given amounts, after an ignored start."""
    samples = []
    for step in range(0, STEPS + 1, 10):
        share, warm = step / STEPS, step >= 100
        samples.append(
            {
                "seconds": step * 0.5,
                "step": step,
                "process 0: resident MB": (100 + grows * share) if warm else 7,
                "process 0: open files": 20 + int(adds * share) + (step % 50 == 0),
                "process 0: CPU seconds": step * 0.25,
                "checkpoints: whole": 2 + (step % 40 == 0),
                "a checkpoint: MB": 1 - 0.5 * (step % 40 == 0),
                "records: MB": step * 0.001,
            }
        )
    return samples


def verdicts(samples: list[process_samples.Sample]) -> dict[str, str]:
    return {name: row["verdict"] for name, row in soak.compare_quarters(samples, STEPS).items()}


def test_constant_quantities_are_flat() -> None:
    rows = soak.compare_quarters(make_samples(), STEPS)
    assert {row["verdict"] for name, row in rows.items() if not name.startswith(soak.PER_STEP)} == {"flat"}
    assert rows["by the step: seconds"]["ratio"] == pytest.approx(1)
    assert rows["by the step: records: MB"]["median"] == pytest.approx([0.001, 0.001])
    assert "by the step: process 0: CPU seconds" in soak.table(rows)


@pytest.mark.parametrize("grows, verdict", [(4.0, "grows"), (-4.0, "falls"), (2.0, "flat")])
def test_memory_is_compared_between_the_first_and_the_last_quarter(grows: float, verdict: str) -> None:
    # The middles of the quarters are 0.675 of the run apart.
    assert verdicts(make_samples(grows=grows))["process 0: resident MB"] == verdict


@pytest.mark.parametrize("adds, verdict", [(1, "flat"), (4, "grows")])
def test_a_count_may_grow_by_one(adds: int, verdict: str) -> None:
    assert verdicts(make_samples(adds=adds))["process 0: open files"] == verdict


def test_a_sample_of_a_work_directory_counts_its_files_by_group(tmp_path: Path) -> None:
    """Unfinished checkpoints and files that grow with each record are counted separately."""
    files = {"metrics.jsonl": 3, "config.json": 9, "checkpoints/validation.json": 5, "checkpoints/manifests.json": 7}
    files |= {f"checkpoints/{step}/state/arrays": 1000 for step in (10, 20)} | {"checkpoints/20/manifest.json": 500}
    files["checkpoints/30.orbax-checkpoint-tmp/state/arrays"] = 100
    for name, size in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    assert process_samples.disk_sample(tmp_path) == pytest.approx(
        {
            "checkpoints: whole": 2,
            "checkpoints: in the making": 1,
            "a checkpoint: files": 1.5,
            "a checkpoint: MB": 0.00125,
            "other files": 2,
            "records: files": 2,
            "records: MB": 8e-6,
        }
    )
