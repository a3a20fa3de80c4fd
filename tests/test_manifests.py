"""The manifests in `launch/`: what can be checked of them without a cluster."""

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
    """Returns the documents of a manifest by their kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((LAUNCH / name).read_text())}


def job_of(name: str) -> dict[str, Any]:
    """The Job, with the environment that the job controller and Kubeflow add to its one container."""
    declared = documents(name)
    if "Job" in declared:
        return declared["Job"]
    jobs = declared["JobSet"] if "JobSet" in declared else declared["TrainingRuntime"]["spec"]["template"]
    (job,) = jobs["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
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


MANIFESTS = ["kubernetes-job.yaml", "jobset.yaml", "kubeflow-trainjob.yaml"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_every_field_of_the_kubernetes_manifests_exists(name):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    job = job_of(name)
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    job["spec"]["template"]["spec"]["container"] = []
    with pytest.raises(kubernetes_validate.ValidationError, match="container"):
        kubernetes_validate.validate(job, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", MANIFESTS)
def test_each_pod_finds_its_process_number(name):
    job = job_of(name)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    told = {variable["name"]: variable.get("value", "told by the cluster") for variable in container["env"]}
    count = job["spec"]["completions"]
    places = [find_job(told | {"JOB_COMPLETION_INDEX": str(index)}) for index in range(count)]
    assert [place.process_id for place in places if place] == list(range(count)) and count == job["spec"]["parallelism"]
    assert all(place.num_processes == count for place in places if place)
    # The pod of index 0, by the name that its controller gives it, in the domain that is declared or the controller's.
    pods = {"kubernetes-job.yaml": "jaxddp-0.jaxddp", "jobset.yaml": "jaxddp-train-0-0.jaxddp"}
    assert {place.host for place in places if place} == {pods.get(name, "jaxddp-node-0-0.jaxddp")}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_mistake_ends_the_kubernetes_job_and_a_saved_run_continues(name):
    spec = job_of(name)["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    rules = {rule["action"]: rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"]}
    assert {action: codes["values"] for action, codes in rules.items()} == {"FailJob": [2], "Ignore": [75]}
    assert {codes["containerName"] for codes in rules.values()} == {container["name"]}
    # A policy for failures of pods is allowed only where their containers are not restarted in place.
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize("name", ["jobset.yaml", "kubeflow-trainjob.yaml"])
def test_a_job_set_restarts_except_after_a_mistake_of_the_user(name):
    declared = documents(name)
    jobs = declared["JobSet"] if "JobSet" in declared else declared["TrainingRuntime"]["spec"]["template"]
    (rule,) = jobs["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert jobs["spec"]["failurePolicy"]["maxRestarts"] > 0
    # With these values any failed pod is a failed job, which restarts the set.
    assert job_of(name)["spec"]["backoffLimit"] == 0


def test_a_train_job_names_its_runtime_and_its_container():
    """Kubeflow looks for these names: `pkg/constants/constants.go` of Trainer 2."""
    declared = documents("kubeflow-trainjob.yaml")
    runtime, job = declared["TrainingRuntime"], declared["TrainJob"]["spec"]
    assert job["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    assert runtime["spec"]["mlPolicy"]["jax"] == {}
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == node["template"]["spec"]["template"]["spec"]["containers"][0]["name"] == "node"
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_every_field_of_the_aws_job_definition_exists():
    definition = json.loads((LAUNCH / "aws-batch.json").read_text())
    service = botocore.session.get_session().get_service_model("batch")
    shape = service.operation_model("RegisterJobDefinition").input_shape
    validator = botocore.validate.ParamValidator()
    assert validator.validate(definition, shape).generate_report() == ""
    container = definition["nodeProperties"]["nodeRangeProperties"][0]["container"]
    container["commands"] = container["command"]
    assert "commands" in validator.validate(definition, shape).generate_report()


def test_aws_batch_retries_a_job_except_after_a_mistake_of_the_user():
    definition = json.loads((LAUNCH / "aws-batch.json").read_text())
    assert definition["retryStrategy"]["evaluateOnExit"] == [{"onExitCode": "2", "action": "EXIT"}]
    assert definition["retryStrategy"]["attempts"] > 1
    (nodes,) = definition["nodeProperties"]["nodeRangeProperties"]
    assert nodes["targetNodes"] == "0:" and definition["nodeProperties"]["mainNode"] == 0


def test_skypilot_continues_a_saved_run():
    """Their fields are those of SkyPilot's reference of tasks; nothing offline checks them."""
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert set(task) == {"name", "num_nodes", "resources", "volumes", "workdir", "secrets", "setup", "run"}
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [75] and task["num_nodes"] == 2


def commands() -> dict[str, list[str]]:
    """Returns the command of each manifest."""
    found = {}
    for name in MANIFESTS:
        (container,) = job_of(name)["spec"]["template"]["spec"]["containers"]
        found[name] = [*container["command"], *container["args"]]
    definition = json.loads((LAUNCH / "aws-batch.json").read_text())
    found["aws-batch.json"] = definition["nodeProperties"]["nodeRangeProperties"][0]["container"]["command"]
    found["skypilot.yaml"] = shlex.split(
        yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())["run"].replace("\\\n", "")
    )
    return found


@pytest.mark.parametrize(("name", "command"), commands().items(), ids=commands())
def test_the_commands_in_manifests_have_existing_options(name, command):
    assert command[:2] == ["jaxddp", "train"]
    options, file = parse_recipe(Train, "jaxddp train", command[2:])
    assert file.config.train.precision == "bfloat16" and str(options.workdir).endswith("runs/imagenet_resnet50")
