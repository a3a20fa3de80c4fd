"""`launch/ray_job.py` while it waits for resources, with a fake Ray. tests/integration/test_ray.py runs a real one."""

import argparse
import signal

import pytest

ray_job = pytest.importorskip("launch.ray_job", reason="ray is missing: pip install ray", exc_type=ImportError)

OPTIONS = argparse.Namespace(processes=2, cpus=1, gpus=1, restarts=3, wait=0.0)


class FakeGroup:
    """A placement group whose resources are not free."""

    def wait(self, seconds: float) -> bool:
        return False


@pytest.fixture
def busy_cluster(monkeypatch) -> list[FakeGroup]:
    """Replace Ray by a cluster without free resources. Return the placement groups that were removed."""
    removed = list[FakeGroup]()
    monkeypatch.setattr(ray_job, "placement_group", lambda bundles, strategy: FakeGroup())
    monkeypatch.setattr(ray_job, "remove_placement_group", removed.append)
    monkeypatch.setattr(ray_job.ray, "cluster_resources", lambda: {"CPU": 4.0, "GPU": 1.0})
    monkeypatch.setattr(ray_job, "PAUSE", 0)
    return removed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_wait_for_resources_ends_the_job_with_its_code(number, busy_cluster, monkeypatch, capsys):
    received = []
    monkeypatch.setattr(FakeGroup, "wait", lambda group, seconds: received.append(number))
    assert ray_job.run(OPTIONS, received) == 128 + number
    assert capsys.readouterr().err == f"ray_job.py: {number.name} before the start\n"
    assert len(busy_cluster) == 1


@pytest.mark.parametrize(
    ("ends", "code"), [([], 2), ([ray_job.End(137, "process 1: killed by SIGKILL")], 137)], ids=["first", "restart"]
)
def test_missing_resources_are_a_mistake_at_the_first_start_only(ends, code, busy_cluster, monkeypatch):
    attempt, earlier = ray_job.attempt, iter(ends)
    monkeypatch.setattr(ray_job, "attempt", lambda *arguments: next(earlier, None) or attempt(*arguments))
    message = "Ray did not reserve .*; start fewer processes, or raise --wait"
    with pytest.raises(ray_job.InputError, match=message) as error:
        ray_job.run(OPTIONS, [])
    assert error.value.exit_code == code and len(busy_cluster) == 1
