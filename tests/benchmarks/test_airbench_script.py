"""The contender that runs airbench's script: its copy for the CPU, and the results that it reads from the table."""

import importlib
import sys
from types import ModuleType

import pytest

TABLE = """
---------------------------------------------------------------------------------
|  run     |  epoch  |  train_acc  |  val_acc  |  tta_val_acc  |  time_seconds  |
---------------------------------------------------------------------------------
|  warmup  |      0  |     0.1005  |   0.1001  |               |        3.0000  |
|          |   eval  |     0.1005  |   0.1001  |       0.1002  |        4.0000  |
|       0  |      0  |     0.6805  |   0.6050  |               |      128.6594  |
|          |      1  |     0.7440  |   0.6819  |               |      307.6499  |
|          |   eval  |     0.7440  |   0.6819  |       0.7083  |      381.3912  |
|       1  |      0  |     0.6800  |   0.6100  |               |      100.0000  |
|          |   eval  |     0.6800  |   0.6100  |       0.6500  |      110.0000  |
"""


@pytest.fixture
def contender(monkeypatch):
    """The module of the contender. Its functions that are tested here do not use torch."""
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    name = "benchmarks.rivals.contenders.torch_airbench"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def test_each_run_has_its_epochs_and_the_first_run_is_ignored(contender):
    first, second = contender.runs(TABLE.splitlines())
    assert (first["top1"], first["seconds"]) == (0.7083, 381.3912)
    assert first["epochs"] == [
        {"train": 0.6805, "val": 0.605, "seconds": 128.6594},
        {"train": 0.744, "val": 0.6819, "seconds": 307.6499},
    ]
    assert second["top1"] == 0.65 and [epoch["val"] for epoch in second["epochs"]] == [0.61]


def test_the_copy_for_the_cpu_runs_the_given_seeds_and_names_no_gpu(contender):
    script = "".join(contender.CHANGES_FOR_CPU) + "accs = [main(run, model) for run in range(200)]"
    changed = contender.for_cpu(script, ["3", "4"])
    assert "cuda" not in changed and "half" not in changed and "compile" not in changed
    assert "for run in [3, 4]]" in changed and "torch.manual_seed(run)" in changed
    with pytest.raises(ValueError, match="the script has no '.cuda\\(\\)'"):
        contender.for_cpu(script.replace(".cuda()", ""), ["0"])
