"""The peers of a job and the peers of a single process compare values in the same way."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import pytest
from support.data import random_table
from support.launches import free_port
from support.networks import linear_model
from support.shared import sgd

import jaxddp
from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE, Peers
from jaxddp.job.control_plane import ControlPlane
from jaxddp.job.environment import Job
from jaxddp.job.membership import join
from jaxddp.job.watchdog import Timeouts
from jaxddp.mesh import Topology

COUNT = 3


class Device(NamedTuple):
    process_index: int
    id: int


class RecordingPeers(Peers):
    """The peers of a single process, which record the names of its exchanges."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def decide(self, name, text, decide):
        self.names.append(name)
        return super().decide(name, text, decide)


@pytest.fixture(scope="module")
def job() -> Iterator[list[Peers]]:
    """Yield the peers of each process of a job. The processes are threads of this process."""
    coordinator = f"127.0.0.1:{free_port()}"
    jobs = [Job(coordinator, COUNT, process) for process in range(COUNT)]
    with ThreadPoolExecutor(COUNT) as pool:
        planes = list(pool.map(lambda process_job: ControlPlane(process_job, {}, Timeouts(30), end=print), jobs))
        yield [*planes]
        assert all(pool.map(ControlPlane.finish, planes))
        for plane in planes:
            plane.leave()


def results_of(job: list[Peers], call: Callable[[Peers], Any]) -> list[Any]:
    """Call a function for all processes at the same time, and return the result or the error of each process."""
    with ThreadPoolExecutor(len(job)) as pool:
        futures = [pool.submit(call, peers) for peers in job]
        return [future.exception(30) or future.result() for future in futures]


@pytest.mark.parametrize("peer_kind", ["job", "alone"])
def test_peers_compare_and_exchange_values(peer_kind, job):
    count = len(all_peers := job if peer_kind == "job" else [ALONE])
    ids = [(peers.process_index, peers.process_count, peers.is_first, peers.is_alone) for peers in all_peers]
    assert ids == [(index, count, index == 0, peer_kind == "alone") for index in range(count)]
    indices = [str(index) for index in range(count)]
    assert results_of(all_peers, lambda peers: peers.exchange("indices", str(peers.process_index))) == [indices] * count
    firsts = results_of(all_peers, lambda peers: peers.from_first("index", lambda: str(peers.process_index)))
    assert firsts == ["0"] * count
    assert results_of(all_peers, lambda peers: peers.agree({"seed": "1"})) == [None] * count


@pytest.mark.parametrize(("other", "name"), [(1, "seed"), (2, "training data")])
def test_a_differing_value_raises_the_same_error_in_all_processes(other, name, job):
    errors = results_of(job, lambda peers: peers.agree({"same": "1", name: str(int(peers.process_index == other))}))
    message = f"{name} differs: process 0 has '0', process {other} has '1'; start every process with the same value"
    message += ", or set data.placement=local for data of each process" if name != "seed" else ""
    assert [(type(error), str(error)) for error in errors] == [(InputError, message)] * COUNT


def test_a_process_without_a_job_is_alone():
    assert [join(None), join(None)] == [ALONE, ALONE]
    assert Topology.create(2).peers is ALONE


def test_a_process_without_a_job_rejects_devices_of_other_processes(monkeypatch):
    """Otherwise the processes would compare no values, and each process would write the files of the run."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    message = "^devices: they belong to 2 processes, but `peers` has only this process; give Topology.create the peers"
    with pytest.raises(InputError, match=message):
        Topology.create([Device(0, 0), Device(1, 1)])


def test_training_compares_everything_with_the_peers_that_it_joined(tmp_path, monkeypatch):
    peers, val = RecordingPeers(), random_table(8, seed=1)
    monkeypatch.setattr("jaxddp.setup.resources.join", lambda *_, **__: peers)
    setup = jaxddp.prepare_training(linear_model(), random_table(16), 2, sgd(0.1), 4)
    options = {"val": val, "workdir": tmp_path, "self_test": "always"}
    jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), **options)
    # The exchange `digests` compares all values that have no exchange of their own.
    assert set(peers.names) == {
        *("digests", "work directory", "work directory written", "work directory seen", "whole checkpoints"),
        *("latest checkpoint", "run id", "metrics of listeners", "predictions", "self-test", "memory of the step"),
        *("validation metrics", "a listener's stop", "finished logs"),
    }
