"""The variables of GKE and the metadata of TPU VMs give the place of a process in its job."""

import pytest
from support.errors import error_line
from support.metadata import serving, write_chips

from jaxddp.core.errors import InputError, Unreachable
from jaxddp.job import tpu
from jaxddp.job.environment import Job, find_job

GKE = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_TOPOLOGY": "2x4", "TPU_SKIP_MDS_QUERY": "true",
    "TPU_WORKER_HOSTNAMES": "first-slice-0-0.first,first-slice-0-1.first", "JOB_COMPLETION_INDEX": "0"
}  # fmt: skip
SECOND_SLICE = GKE | {
    "TPU_WORKER_HOSTNAMES": "first-slice-1-0.first,first-slice-1-1.first", "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "first-slice-0-0.first:8080"
}  # fmt: skip
ONE_HOST = {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
WARNING = (
    "WARNING: could not determine TPU worker hostnames or IP addresses, please set env var `TPU_WORKER_HOSTNAMES` "
    "manually, otherwise libtpu.so will not properly initialize."
)
KAGGLE = {
    "TPU_WORKER_HOSTNAMES": WARNING, "TPU_WORKER_ID": "0", "TPU_PROCESS_ADDRESSES": "local",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1", "TPU_HOST_BOUNDS": "1,1,1",
    "TPU_ACCELERATOR_TYPE": WARNING.replace("worker hostnames or IP addresses", "accelerator type")
}  # fmt: skip
"""The variables of Kaggle's TPU v5e, as users have reported them. On some machines, the names are `localhost`."""
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "0"}
STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"
}  # fmt: skip
POD = {
    "attributes/agent-worker-number": "2",
    "attributes/worker-network-endpoints": ",".join(f"unknown:unknown:10.0.0.{n}" for n in (7, 5, 6, 4)),
    "attributes/tpu-env": "ACCELERATOR_TYPE: 'v4-32'\nWORKER_ID: '2'\nZONE: 'us-central2-b'",
}


def place(environ: dict[str, str]) -> tuple[int, int, str]:
    job = job_of(environ)
    return job.process_id, job.num_processes, job.host


def job_of(environ: dict[str, str], *root) -> Job:
    job = find_job(environ, *root)
    assert job is not None
    return job


def test_on_gke_each_host_of_a_slice_is_a_process():
    job = job_of(GKE | {"TPU_WORKER_ID": "1"})
    assert (job.process_id, job.num_processes, job.host) == (1, 2, "first-slice-0-0.first")
    assert job.local_device_ids is None and job.sources == ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID")
    assert job.port == job_of(GKE | {"TPU_WORKER_ID": "0"}).port


@pytest.mark.parametrize("worker", [0, 1])
def test_the_second_slice_has_the_higher_ids_and_the_coordinator_of_the_first(worker):
    assert place(SECOND_SLICE | {"TPU_WORKER_ID": str(worker)}) == (2 + worker, 4, "first-slice-0-0.first")
    first = job_of(SECOND_SLICE | {"TPU_WORKER_ID": "0", "MEGASCALE_SLICE_ID": "0"})
    assert first.process_id == 0 and first.port == job_of(SECOND_SLICE | {"TPU_WORKER_ID": "1"}).port


@pytest.mark.parametrize(
    "environ",
    [
        ONE_HOST,
        ONE_HOST | {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"},
        {"TPU_WORKER_ID": "0"},
        # Nothing else is read then.
        GKE | {"TPU_WORKER_ID": "x", "TPU_WORKER_HOSTNAMES": "a,,b", "JAX_NUM_PROCESSES": "1"},
        KAGGLE,
        KAGGLE | {"TPU_WORKER_HOSTNAMES": "localhost"},
    ],
    ids=str,
)
def test_one_host_is_a_single_process(environ):
    assert find_job(environ) is None


def test_on_kaggle_a_process_is_alone(server, machine):
    """Kaggle has chips, and no metadata server that answers."""
    server.status = 500
    assert find_job(KAGGLE | server.environ, machine) is None and server.asked == []


def test_a_warning_in_place_of_the_hosts_is_no_setting(server, machine):
    warned = {"TPU_WORKER_HOSTNAMES": WARNING, "TPU_ACCELERATOR_TYPE": "WARNING: could not determine"}
    assert place(warned | SKYPILOT) == (0, 2, "10.0.0.4")
    assert job_of(warned | server.environ, machine) == job_of(server.environ, machine)


@pytest.mark.parametrize("form", ["[fd00::{}]", "unknown:7:[fd00::{}]"])
def test_hosts_with_ipv6_addresses(form):
    hosts = ", ".join(form.format(host) for host in (1, 2))
    assert place({"TPU_WORKER_HOSTNAMES": hosts, "TPU_WORKER_ID": "1"}) == (1, 2, "fd00::1")


def test_the_ids_of_libtpu_come_before_those_of_a_scheduler_of_hosts():
    assert place(GKE | SKYPILOT | {"TPU_WORKER_ID": "1"}) == (1, 2, "first-slice-0-0.first")
    # A launcher within the job, and variables of JAX, come first.
    assert place(GKE | STEP | {"TPU_WORKER_ID": "0"}) == (1, 2, "a1")
    explicit = {"JAX_COORDINATOR_ADDRESS": "h9:1", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "7"}
    assert place(GKE | {"TPU_WORKER_ID": "0"} | explicit) == (7, 8, "h9")
    # A single host says nothing about other machines.
    assert place(ONE_HOST | SKYPILOT) == (0, 2, "10.0.0.4")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (GKE | {"TPU_WORKER_ID": "x"}, "TPU_WORKER_ID='x': expected a whole number from 0 to "),
        (GKE | {"TPU_WORKER_ID": "2"}, "TPU_WORKER_ID=2: expected 0 to 1, because TPU_WORKER_HOSTNAMES has 2 hosts"),
        (
            {"TPU_WORKER_HOSTNAMES": "a,b"},
            "environment: TPU_WORKER_HOSTNAMES set but not this process's id (JAX_PROCESS_ID); set it, or ",
        ),
        (
            GKE | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "a,,b"},
            "TPU_WORKER_HOSTNAMES='a,,b': expected the names of hosts, separated by commas",
        ),
        (
            GKE | {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "fd00::1,fd00::2"},
            "TPU_WORKER_HOSTNAMES='fd00::1,fd00::2': expected the names of hosts, separated by commas",
        ),
        (
            GKE | {"TPU_WORKER_ID": "0", "MEGASCALE_COORDINATOR_ADDRESS": "h0:8080"},
            "environment: MEGASCALE_COORDINATOR_ADDRESS set but not MEGASCALE_NUM_SLICES and MEGASCALE_SLICE_ID; "
            "several slices need all of them, and one slice needs none",
        ),
        (
            SECOND_SLICE | {"TPU_WORKER_ID": "0", "MEGASCALE_SLICE_ID": "2"},
            "MEGASCALE_SLICE_ID=2: expected 0 to 1, for MEGASCALE_NUM_SLICES=2",
        ),
        (
            SECOND_SLICE | {"TPU_WORKER_ID": "0", "MEGASCALE_COORDINATOR_ADDRESS": "h0:x:1"},
            "MEGASCALE_COORDINATOR_ADDRESS='h0:x:1': expected HOST or HOST:PORT, the first host of slice 0",
        ),
    ],
)
def test_values_that_contradict_each_other_are_an_error(environ, message):
    assert error_line(find_job, environ).startswith(message)


@pytest.fixture(autouse=True)
def forget():
    """Forget the answers for the ports of other tests."""
    tpu._attributes.cache_clear()


@pytest.fixture
def machine(tmp_path):
    """The root of a machine with four chips."""
    return write_chips(tmp_path, *(f"dev/accel{n}" for n in range(4)))


@pytest.fixture
def server():
    with serving(POD) as server:
        yield server


def test_a_tpu_vm_asks_the_metadata_server(server, machine, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    job = job_of(server.environ, machine)
    assert (job.process_id, job.num_processes, job.host) == (2, 4, "10.0.0.7")
    assert job.sources == ("metadata/worker-network-endpoints", "metadata/agent-worker-number")
    # The place of a machine does not change, so it is asked once.
    count = len(server.asked)
    assert job_of(server.environ, machine) == job and len(server.asked) == count


def test_the_metadata_of_several_slices(server, machine):
    server.answers["attributes/worker-network-endpoints"] = "t1-w0,t1-w1,t1-w2"
    server.answers["attributes/tpu-env"] += (
        "\nMEGASCALE_NUM_SLICES: '3'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.9.1:8080'\n"
    )
    job = job_of(server.environ, machine)
    assert (job.process_id, job.num_processes, job.host) == (1 * 3 + 2, 9, "10.0.9.1")


def test_a_machine_without_these_attributes_is_a_single_process(machine):
    with serving({}) as server:
        assert find_job(server.environ, machine) is None
        assert len(server.asked) == 3


@pytest.mark.parametrize(
    "environ",
    [
        {"JAX_PLATFORMS": "cpu"},
        {"TPU_SKIP_MDS_QUERY": "1"},
        {"JAX_NUM_PROCESSES": "1"},
        ONE_HOST,
        STEP,
        {"JAX_COORDINATOR_ADDRESS": "h0:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    ],
    ids=str,
)
def test_the_metadata_server_is_not_asked_without_need(environ, server, machine):
    find_job(environ | server.environ, machine)
    assert server.asked == []


def test_the_metadata_server_is_not_asked_on_other_machines(server, tmp_path):
    assert find_job(server.environ, write_chips(tmp_path, "dev/nvidia0")) is None
    assert find_job(server.environ, write_chips(tmp_path, "dev/vfio/3", vendor="0x8086")) is None
    assert server.asked == []


ADVICE = (
    ", so the place of this machine in its TPU slice is not known; set TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, or "
    "JAX_NUM_PROCESSES=1 for a single process"
)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"hangs": True}, f": no answer in time{ADVICE}"),
        ({"drips": True}, f": no answer in time{ADVICE}"),
        ({"status": 500}, f": status 500 for attributes/agent-worker-number{ADVICE}"),
        ({"flavor": "none"}, f" has no header Metadata-Flavor: Google{ADVICE}"),
    ],
)
def test_without_the_metadata_server_a_process_does_not_train_alone(fault, message, server, machine, monkeypatch):
    # The bound is the same for all faults. A hanging server would otherwise hold the process for a minute.
    monkeypatch.setattr(tpu, "METADATA_SECONDS", 0.5)
    vars(server).update(fault)
    line = error_line(find_job, server.environ, machine, kind=Unreachable)
    assert line.startswith("the metadata server at 127.0.0.1:") and line.endswith(message)
    # Later questions do not wait again.
    count = len(server.asked)
    assert error_line(find_job, server.environ, machine, kind=Unreachable) == line
    assert len(server.asked) == count


def test_nonsense_of_the_metadata_server_is_an_error(server, machine):
    server.answers["attributes/worker-network-endpoints"] = "<html>:no"
    with pytest.raises(InputError, match="metadata/worker-network-endpoints='<html>:no': expected the names of hosts"):
        find_job(server.environ, machine)
