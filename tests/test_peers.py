"""Peers compare values in the same way, whatever carries them."""

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import pytest
from support.data import random_table
from support.networks import linear_model
from support.peers import Second
from support.shared import sgd

import jaxddp
from jaxddp.core.errors import InputError
from jaxddp.core.peers import ALONE, Peers
from jaxddp.job.control_plane import ControlPlane
from jaxddp.job.environment import Job
from jaxddp.job.job_peers import JobPeers
from jaxddp.job.membership import join
from jaxddp.job.watchdog import Timeouts
from jaxddp.mesh import Topology

COUNT = 3


class Device(NamedTuple):
    process_index: int
    id: int


class Asked(Peers):
    """The peers of a single process, which record the names of its exchanges."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def decide(self, name, text, decide):
        self.names.append(name)
        return super().decide(name, text, decide)


@pytest.fixture(scope="module")
def job() -> Iterator[list[Peers]]:
    """The peers of each process of a job whose processes are threads of this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = "{}:{}".format(*probe.getsockname())
    jobs = [Job(coordinator, COUNT, process) for process in range(COUNT)]
    with ThreadPoolExecutor(COUNT) as pool:
        planes = list(pool.map(lambda own: ControlPlane.join(own, {}, 30, end=print), jobs))
        yield [JobPeers(plane) for plane in planes]
        assert all(pool.map(ControlPlane.finish, planes))
        for plane in planes:
            plane.leave()


def of_each(job: list[Peers], ask: Callable[[Peers], Any]) -> list[Any]:
    """Return the result or the error of each process, if all call a function at the same time."""
    with ThreadPoolExecutor(len(job)) as pool:
        asked = [pool.submit(ask, peers) for peers in job]
        return [each.exception(30) or each.result() for each in asked]


@pytest.mark.parametrize("kind", ["job", "alone"])
def test_peers_compare_and_exchange_values(kind, job):
    everyone = job if kind == "job" else [ALONE]
    count = len(everyone)
    assert [(peers.process_index, peers.process_count) for peers in everyone] == [
        (each, count) for each in range(count)
    ]
    assert [peers.is_first for peers in everyone] == [True] + [False] * (count - 1)
    assert {peers.is_alone for peers in everyone} == {kind == "alone"}
    places = [str(each) for each in range(count)]
    assert of_each(everyone, lambda peers: peers.exchange("places", str(peers.process_index))) == [places] * count
    assert of_each(everyone, lambda peers: peers.from_first("place", lambda: str(peers.process_index))) == ["0"] * count
    assert of_each(everyone, lambda peers: peers.agree({"seed": "1"})) == [None] * count


@pytest.mark.parametrize("other", [1, 2])
def test_a_differing_value_is_named_to_all_processes(other, job):
    found = of_each(job, lambda peers: peers.agree({"same": "1", "seed": str(int(peers.process_index == other))}))
    line = f"seed differs: process 0 has '0', process {other} has '1'; start every process with the same value"
    assert [(type(error), str(error)) for error in found] == [(InputError, line)] * COUNT


def test_a_process_waits_as_long_as_its_job_allows(job):
    assert {peers.longest_wait for peers in job} == {Timeouts().longest}


def test_a_process_without_a_job_is_alone():
    assert [join(None), join(None)] == [ALONE, ALONE]
    assert Topology.create(2).peers is ALONE


def test_a_process_without_a_job_rejects_devices_of_other_processes(monkeypatch):
    """Otherwise it would compare nothing, and each process would write for all."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    line = "^devices: they belong to 2 processes, but `peers` has only this process; give Topology.create the peers"
    with pytest.raises(InputError, match=line):
        Topology.create([Device(0, 0), Device(1, 1)])


def test_a_topology_belongs_to_its_peers():
    topology = Topology.create(2, Second())
    assert (topology.process_index, topology.process_count) == (1, 2)


def test_training_compares_everything_with_the_peers_that_it_joined(tmp_path, monkeypatch):
    asked, val = Asked(), random_table(8, seed=1)
    monkeypatch.setattr("jaxddp.setup.joining.join", lambda *_, **__: asked)
    setup = jaxddp.prepare_training(linear_model(), random_table(16), 2, sgd(0.1), 4)
    at_all = {"val": val, "workdir": tmp_path, "self_test": "always"}
    jaxddp.train(jaxddp.softmax_cross_entropy, setup, listeners=(), **at_all)
    # Values without an exchange of their own are compared by a digest.
    assert set(asked.names) == {
        *("digests", "work directory", "work directory written", "work directory seen", "whole checkpoints"),
        *("latest checkpoint", "run id", "metrics of listeners", "predictions", "self-test", "memory of the step"),
        "validation metrics",
    }
