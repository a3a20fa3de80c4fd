"""The environment variables of each scheduler give the number of processes, the process id and the coordinator."""

import os
import socket
from unittest.mock import MagicMock

import pytest
from support.errors import error_line

import jaxddp.job.schedulers as schedulers
from jaxddp.core.errors import InputError
from jaxddp.job.environment import Job, find_job
from jaxddp.job.schedulers import pmi_launcher, reachable_address

SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9\n10.0.0.5", "SKYPILOT_NUM_NODES": "3", "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-24-00-15-43-109312_train_4"
}  # fmt: skip
BATCH = {
    "AWS_BATCH_JOB_ATTEMPT": "1", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "2", "AWS_BATCH_JOB_NUM_NODES": "4",
    "AWS_BATCH_CE_NAME": "gpus", "AWS_BATCH_JQ_NAME": "training"
}  # fmt: skip
MAIN_ADDRESS = {"AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7"}
XPK = {
    "REPLICATED_JOB_NAME": "slice-job", "JOBSET_NAME": "first", "NNODES": "2", "GPUS_PER_NODE": "8",
    "USE_GPUDIRECT": "rdma", "COMMAND": "jaxddp train digits", "JAX_COORDINATOR_PORT": "6002",
    "JAX_COORDINATOR_ADDRESS": "first-slice-job-0-0.first"
}  # fmt: skip
KUBEFLOW_JAX = {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "first-node-0-0.first:29500"}
KUBEFLOW_TORCH = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "first-node-0-0.first",
    "PET_MASTER_PORT": "29500"
}  # fmt: skip
JAX_JOB = {
    "PYTHONUNBUFFERED": "1", "COORDINATOR_PORT": "6666", "COORDINATOR_ADDRESS": "first-worker-0", "NUM_PROCESSES": "2"
}  # fmt: skip
SUBMITIT = {
    "SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_NTASKS": "2", "SUBMITIT_LOCAL_JOB_ID": "4711",
    "SUBMITIT_LOCAL_NODEID": "0", "SUBMITIT_LOCAL_JOB_NUM_NODES": "1", "CUDA_VISIBLE_DEVICES": "0,1"
}  # fmt: skip
TORCHRUN = {
    "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "8008", "WORLD_SIZE": "24", "RANK": "9", "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "sweep-3"
}  # fmt: skip
STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "a[1-2]", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"
}  # fmt: skip


def batch(node: int, **changes: str) -> dict[str, str]:
    """Return the variables of a node. Each node has its own job id, and the main node, node 2, has no address."""
    node_variables = {"AWS_BATCH_JOB_ID": f"f1d2-77#{node}", "AWS_BATCH_JOB_NODE_INDEX": str(node)}
    return BATCH | node_variables | ({} if node == 2 else MAIN_ADDRESS) | changes


def job_of(environ: dict[str, str]) -> Job:
    job = find_job(environ)
    assert job is not None
    return job


def test_skypilot_runs_one_process_on_each_node():
    job = job_of(SKYPILOT | {"SKYPILOT_NODE_RANK": "2"})
    assert (job.host, job.num_processes, job.process_id, job.local_device_ids) == ("10.0.0.4", 3, 2, None)
    other = job_of(SKYPILOT | {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_TASK_ID": "sky-2026-11-24-00-15-43-109312_train_5"})
    assert other.port != job.port and other.run_id != job.run_id == SKYPILOT["SKYPILOT_TASK_ID"]
    assert str(job).endswith("(from SKYPILOT_NODE_IPS, SKYPILOT_NUM_NODES, SKYPILOT_NODE_RANK)")


def test_the_main_node_of_aws_batch_is_process_0(monkeypatch):
    monkeypatch.setattr(schedulers, "reachable_address", lambda: "10.0.0.7")
    jobs = [job_of(batch(node)) for node in range(4)]
    assert [job.process_id for job in jobs] == [2, 1, 0, 3]
    # All nodes use one address, which the main node finds by itself.
    assert {job.coordinator for job in jobs} == {f"10.0.0.7:{jobs[0].port}"}
    assert {job.run_id for job in jobs} == {"f1d2-77.1"} and {job.num_processes for job in jobs} == {4}
    second_attempt = job_of(batch(1, AWS_BATCH_JOB_ATTEMPT="2"))
    assert second_attempt.run_id == "f1d2-77.2" and second_attempt.port != jobs[1].port
    usual = [job_of(batch(node, AWS_BATCH_JOB_MAIN_NODE_INDEX="0", **MAIN_ADDRESS)) for node in range(4)]
    assert [job.process_id for job in usual] == [0, 1, 2, 3]


def test_a_machines_own_address_is_reachable_for_others(monkeypatch):
    chooser = MagicMock()
    chooser.__enter__().getsockname.return_value = "10.1.2.4", 40000
    monkeypatch.setattr(socket, "socket", lambda *kind: chooser)
    assert reachable_address() == "10.1.2.4"
    chooser.__enter__().connect.side_effect = OSError(101, "Network is unreachable")
    with pytest.raises(InputError, match="this machine has no address that others reach; set JAX_COORDINATOR_ADDRESS"):
        reachable_address()


@pytest.mark.parametrize(
    ("environ", "process", "coordinator"),
    [
        (XPK, "NODE_RANK", "first-slice-job-0-0.first:6002"),
        (KUBEFLOW_JAX, "JAX_PROCESS_ID", "first-node-0-0.first:29500"),
        (KUBEFLOW_TORCH, "PET_NODE_RANK", "first-node-0-0.first:29500"),
        (JAX_JOB, "PROCESS_ID", "first-worker-0:6666"),
    ],
    ids=["xpk", "kubeflow-jax", "kubeflow-torch", "jaxjob"],
)
def test_on_kubernetes_each_pod_is_a_process(environ, process, coordinator):
    indexed = {} if environ is JAX_JOB else {"JOB_COMPLETION_INDEX": "1"}
    job = job_of(environ | indexed | {process: "1", "KUBERNETES_SERVICE_HOST": "10.96.0.1"})
    assert (job.coordinator, job.num_processes, job.process_id) == (coordinator, 2, 1)
    assert job.local_device_ids is None and process in job.sources


@pytest.mark.parametrize("rank", [0, 1])
def test_submitit_on_one_machine_gives_each_task_its_accelerator(rank):
    task = {"SUBMITIT_LOCAL_GLOBALID": str(rank), "SUBMITIT_LOCAL_LOCALID": str(rank)}
    job = job_of(SUBMITIT | task)
    assert (job.host, job.num_processes, job.process_id, job.local_device_ids) == ("127.0.0.1", 2, rank, (rank,))
    assert job.run_id == "4711" and job.port != job_of(SUBMITIT | task | {"SUBMITIT_LOCAL_JOB_ID": "4712"}).port
    # The job is submitted within a step of SLURM, whose variables the tasks inherit.
    assert job_of(STEP | {"SLURM_PROCID": "3"} | SUBMITIT | task).process_id == rank


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"ROCR_VISIBLE_DEVICES": "0"}, None),
        # srun --gpus-per-task=2, with the variables of several versions of SLURM.
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "a100:2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TRES_PER_TASK": "cpu=12,gres/gpu=2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_TRES_BIND": "gres/gpu:per_task:2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPU_BIND": "mask_gpu:0x3,0xc"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, None),
        # Nodes have different numbers of tasks.
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_STEP_TASKS_PER_NODE": "8(x2),2", "SLURM_NODEID": "2"}, (1,)),
        # srun --gpus-per-task=1 --gpu-bind=none shows all GPUs to each task.
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1"}, (1,)),
        # These are the variables of the step in which torchrun was started.
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "SLURM_GPUS_PER_TASK": "8"}, (1,)),
        (TORCHRUN | {"CUDA_VISIBLE_DEVICES": "0,1"}, None),
    ],
)
def test_a_process_uses_all_gpus_if_it_sees_only_its_own(environ, expected):
    assert job_of(STEP | {"SLURM_PROCID": "3"} | environ).local_device_ids == expected


def test_the_port_of_torchruns_agent_is_not_used():
    agent = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    job, other = job_of(agent), job_of(agent | {"RANK": "0"})
    assert job.coordinator == other.coordinator and job.host == "10.0.0.4" and job.port != 8008
    assert job_of(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).port == 8008
    assert job.run_id == "sweep-3"


def test_open_mpi_5_has_another_variable_for_the_job():
    environ = {
        "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1", "PMIX_NAMESPACE": "prterun-host-17@1"
    }  # fmt: skip
    job, other = job_of(environ), job_of(environ | {"PMIX_NAMESPACE": "prterun-host-18@1"})
    assert (job.host, job.process_id, job.run_id) == ("127.0.0.1", 1, "prterun-host-17@1") and job.port != other.port
    on_two_hosts = environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    assert job_of(on_two_hosts | {"PMIX_NAMESPACE": "prterun-gpu-node-3-17@1"}).host == "gpu-node-3"
    with pytest.raises(InputError, match="OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK set but not the coordinator's"):
        find_job(on_two_hosts | {"PMIX_NAMESPACE": "slurm.pmix.77.0"})


@pytest.mark.parametrize("stat", [None, "77 (a) b) S 1234 77"])
def test_the_launcher_is_the_nearest_ancestor_that_can_be_read(stat, tmp_path):
    if stat is not None:
        folder = tmp_path / str(os.getppid())
        folder.mkdir()
        (folder / "environ").write_bytes(b"A=1\0PMI_RANK=0\0")
        (folder / "stat").write_text(stat)
    # An ancestor of another user is the launcher.
    assert pmi_launcher(tmp_path) == (1234 if stat else os.getppid())


NODE = SKYPILOT | {"SKYPILOT_NODE_RANK": "1"}
EXPLICIT = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:4242", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"}


@pytest.mark.parametrize("outer", [NODE, batch(1), STEP | {"SLURM_PROCID": "3"}])
def test_a_launch_or_torchrun_within_a_scheduler_is_a_separate_job(outer):
    job = job_of(outer | EXPLICIT | {"JAXDDP_RUN_ID": "ours"})
    assert (job.coordinator, job.num_processes, job.process_id, job.run_id) == ("127.0.0.1:4242", 2, 0, "ours")
    job = job_of(outer | TORCHRUN)
    assert (job.coordinator, job.num_processes, job.process_id) == ("10.0.0.4:8008", 24, 9)
    assert job.run_id == "sweep-3" and job.local_device_ids == (1,)


def test_values_of_two_schedulers_are_not_mixed():
    """A count that a script exports for another program must neither separate a process nor change its job."""
    step = STEP | {"SLURM_PROCID": "3"}
    for size in ("1", "64"):
        assert job_of(step | {"WORLD_SIZE": size}).num_processes == 4
        assert job_of(NODE | {"WORLD_SIZE": size, "NUM_PROCESSES": "8", "NNODES": "5"}).num_processes == 3
    assert job_of(step | {"MASTER_ADDR": "a1", "MASTER_PORT": "8008"}).coordinator == job_of(step).coordinator


@pytest.mark.parametrize(
    "environ",
    [
        {"AWS_BATCH_JOB_ID": "f1d2-77:3", "AWS_BATCH_JOB_ARRAY_INDEX": "3", "AWS_BATCH_JOB_ARRAY_SIZE": "10"},
        batch(0, AWS_BATCH_JOB_NUM_NODES="1", AWS_BATCH_JOB_MAIN_NODE_INDEX="0"),
        KUBEFLOW_JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0", "JOB_COMPLETION_INDEX": "0"},
        # The user makes each pod, node or task a single process.
        {"JOB_COMPLETION_INDEX": "3", "JAX_NUM_PROCESSES": "1"},
        STEP | {"SLURM_PROCID": "3", "JAX_NUM_PROCESSES": "1"},
        # These names have no meaning without another variable of their scheduler.
        {"NNODES": "2", "NODE_RANK": "1"},
        {"NUM_PROCESSES": "8", "PROCESS_ID": "1"},
    ],
)
def test_a_count_of_one_is_a_single_process(environ):
    assert find_job(environ) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"WORLD_SIZE": "8"},
            "environment: WORLD_SIZE set but not the coordinator's address (JAX_COORDINATOR_ADDRESS) and this "
            "process's id (JAX_PROCESS_ID); set them, or JAX_NUM_PROCESSES=1 for a single process",
        ),
        (
            KUBEFLOW_TORCH | {"PET_NODE_RANK": "0", "PET_NNODES": "1:4"},
            "PET_NNODES='1:4': expected a whole number from 1 to 16,777,216",
        ),
    ],
)
def test_several_processes_without_a_needed_variable_raise_a_one_line_error(environ, expected):
    assert error_line(find_job, environ) == expected
