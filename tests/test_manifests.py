"""The manifests in `launch/` are valid, as far as a test without a cluster can check."""

import json
import shlex
from pathlib import Path
from typing import Any

import botocore.session
import botocore.validate
import pytest
import yaml

from jaxddp.command_line.parse import parse_recipe
from jaxddp.commands.train import Train
from jaxddp.job.environment import find_job

LAUNCH = Path(__file__).parent.parent / "launch"
KUBERNETES = "1.31"


def documents(name: str) -> dict[str, Any]:
    """Return the documents of a manifest by their kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((LAUNCH / name).read_text())}


def job_of(name: str) -> dict[str, Any]:
    """Return the Job of a manifest, with the command and the variables that Kubeflow sets in its only container."""
    declared = documents(name)
    if "Job" in declared:
        return declared["Job"]
    jobs = declared["JobSet"] if "JobSet" in declared else declared["TrainingRuntime"]["spec"]["template"]
    (job,) = jobs["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    if "google.com/tpu" in str(spec):
        # What GKE adds, without the id of each host.
        (container,) = spec["template"]["spec"]["containers"]
        names = [f"jaxddp-{job['name']}-0-{index}.jaxddp" for index in range(spec["completions"])]
        container["env"].append({"name": "TPU_WORKER_HOSTNAMES", "value": ",".join(names)})
    if "TrainJob" in declared:
        trainer = declared["TrainJob"]["spec"]["trainer"]
        (container,) = spec["template"]["spec"]["containers"]
        container |= {"command": trainer["command"], "args": trainer["args"], "resources": trainer["resourcesPerNode"]}
        coordinator = "{0}-{1}-0-0.{0}:29500".format(declared["TrainJob"]["metadata"]["name"], job["name"])
        container["env"] += [
            {"name": "JAX_NUM_PROCESSES", "value": str(trainer["numNodes"])},
            {"name": "JAX_COORDINATOR_ADDRESS", "value": coordinator},
        ]
        spec |= {"completionMode": "Indexed", "parallelism": trainer["numNodes"], "completions": trainer["numNodes"]}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "jaxddp"}, "spec": spec}


MANIFESTS = ["kubernetes-job.yaml", "jobset.yaml", "jobset-tpu.yaml", "kubeflow-trainjob.yaml"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_field_of_the_kubernetes_manifests_exists(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    job = job_of(name)
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    job["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="container"):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_pod_finds_its_process_number_and_its_exit_code_decides(name):
    job = job_of(name)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {variable["name"]: variable.get("value", "set by the cluster") for variable in container["env"]}
    count = job["spec"]["completions"]
    ids = ["JOB_COMPLETION_INDEX"] + ["TPU_WORKER_ID"] * ("TPU_WORKER_HOSTNAMES" in environment)
    pod_jobs = [find_job(environment | dict.fromkeys(ids, str(index))) for index in range(count)]
    assert [pod.process_id for pod in pod_jobs if pod] == list(range(count)) and count == job["spec"]["parallelism"]
    assert all(pod.num_processes == count for pod in pod_jobs if pod)
    # The coordinator is pod 0. Its host is the pod's name in the declared domain or in the controller's domain.
    coordinators = {
        "kubernetes-job.yaml": "jaxddp-0.jaxddp",
        "jobset.yaml": "jaxddp-train-0-0.jaxddp",
        "jobset-tpu.yaml": "jaxddp-slice-0-0.jaxddp",
    }
    assert {pod.host for pod in pod_jobs if pod} == {coordinators.get(name, "jaxddp-node-0-0.jaxddp")}
    # Exit code 2 ends the job, and exit code 75 restarts it.
    spec = job["spec"]
    rules = {rule["action"]: rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"]}
    assert {action: codes["values"] for action, codes in rules.items()} == {"FailJob": [2], "Ignore": [75]}
    assert {codes["containerName"] for codes in rules.values()} == {container["name"]}
    # Kubernetes allows podFailurePolicy only with this restartPolicy.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_every_field_of_the_aws_job_definition_exists_and_it_retries_jobs():
    definition = json.loads((LAUNCH / "aws-batch.json").read_text())
    service = botocore.session.get_session().get_service_model("batch")
    shape = service.operation_model("RegisterJobDefinition").input_shape
    validator = botocore.validate.ParamValidator()
    assert validator.validate(definition, shape).generate_report() == ""
    container = definition["nodeProperties"]["nodeRangeProperties"][0]["container"]
    container["commands"] = container["command"]
    assert "commands" in validator.validate(definition, shape).generate_report()
    # A job is retried except after exit code 2.
    assert definition["retryStrategy"]["evaluateOnExit"] == [{"onExitCode": "2", "action": "EXIT"}]
    assert definition["retryStrategy"]["attempts"] > 1
    (nodes,) = definition["nodeProperties"]["nodeRangeProperties"]
    assert nodes["targetNodes"] == "0:" and definition["nodeProperties"]["mainNode"] == 0


def commands() -> dict[str, list[str]]:
    """Return the command of each manifest."""
    commands_by_name = {}
    for name in MANIFESTS:
        (container,) = job_of(name)["spec"]["template"]["spec"]["containers"]
        commands_by_name[name] = [*container["command"], *container["args"]]
    definition = json.loads((LAUNCH / "aws-batch.json").read_text())
    commands_by_name["aws-batch.json"] = definition["nodeProperties"]["nodeRangeProperties"][0]["container"]["command"]
    for name in ("skypilot.yaml", "skypilot-tpu.yaml"):
        task = yaml.safe_load((LAUNCH / name).read_text())
        assert "--python 3.12 ~/venv" in task["setup"]
        words = shlex.split(task["run"].replace("\\\n", ""))
        commands_by_name[name] = [words[0].removeprefix("~/venv/bin/"), *words[1:]]
    return commands_by_name


@pytest.mark.parametrize(("name", "command"), commands().items(), ids=commands())
def test_the_commands_in_manifests_have_existing_options(name, command):
    assert command[:2] == ["jaxddp", "train"]
    options, file = parse_recipe(Train, "jaxddp train", command[2:])
    assert file.config.train.precision == "bfloat16" and str(options.workdir).endswith("runs/imagenet_resnet50")
