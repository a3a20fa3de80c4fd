"""Private names of libraries: every use is listed here and checked before use, and a log line names the lost feature.

docs/design.md explains the uses ("Private names").
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxddp.core.libraries as libraries
from jaxddp.engine import compilation
from jaxddp.job import membership
from jaxddp.measure import cost
from jaxddp.platforms import PLATFORMS

ROOT = Path(__file__).parent.parent
LOST = "something is lost"
FOLDERS = ("jaxddp", "configs", "launch", "benchmarks", "tests")

USED = {
    "jaxddp/engine/gradients.py": "eqns",
    "jaxddp/engine/compilation.py": "jax._src.compiler jax._src.lru_cache.LRUCache _cache_write",
    "jaxddp/job/membership.py": "jax.experimental.multihost_utils jax._src.lib._jax",
    "jaxddp/measure/cost.py": "memory_analysis eqns",
    "jaxddp/inference/exports.py": "jax.experimental.jax2tf jax2onnx.plugins.jax.lax.pad",
    "benchmarks/programs/gpu_plugin.py": "jax._src.lib.xla_client _make_compile_only_devices",
    "benchmarks/programs/tpu_plugin.py": "jax.experimental.topologies",
    "tests/benchmarks/test_gpu_program.py": "jaxlib._hlo",
    "tests/benchmarks/test_tpu_program.py": "jaxlib._hlo",
    "tests/support/torchvision_golden.py": "_apply_op _augmentation_space",
    "tests/test_resident.py": "jax.experimental.multihost_utils",
    "tests/test_start.py": "jax._src.compilation_cache jax._src.compiler _cache_write",
}
"""Private names by file. Names in `UNDOCUMENTED` are searched for in the package only."""
UNDOCUMENTED = {"eqns", "memory_analysis", "plugins"}
"""Names without an underscore that the library's reference does not mention, or does not guarantee."""
PUBLIC_IN_PYTHON = {"_asdict", "_exit", "_fields", "_make", "_replace", "_repr_html_", "_repr_png_"}
ATTRIBUTE_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


nodes = functools.cache(lambda source: list(ast.walk(ast.parse(source))))


def defined_names(source: str) -> Iterator[str]:
    """Return the private names that a module defines, at any depth."""
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        # An attribute of another object may belong to a library.
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else []


FILES = {file: file.read_text() for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))}


@functools.cache
def project_names() -> set[str]:
    return {name for source in FILES.values() for name in defined_names(source) if is_private(name)}


def find_uses(path: str, source: str) -> set[str]:
    """Return the private names of libraries that a module uses."""
    undocumented = UNDOCUMENTED if path.startswith("jaxddp/") else set()
    allowed = PUBLIC_IN_PYTHON.union(project_names(), defined_names(source))

    def is_unsupported(name: str) -> bool:
        return (is_private(name) and name not in allowed) or name in undocumented or name == "experimental"

    uses = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            uses |= {node.attr} if is_unsupported(node.attr) else set()
            continue
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            called, name = node.func, getattr(node.args[1], "value", None)
            function = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if function in ATTRIBUTE_FUNCTIONS and isinstance(name, str) and is_unsupported(name):
                uses.add(name)
            continue
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            key = getattr(node.slice, "value", None)
            uses |= {"sys.modules['keras']"} if key == "keras" else set()
            continue
        else:
            continue
        library_modules = [module for module in modules if module.partition(".")[0] not in ("jaxddp", "tests")]
        uses |= {module for module in library_modules if any(map(is_unsupported, module.split(".")))}
    return uses


@pytest.mark.ci
def test_the_list_has_exactly_the_private_names_in_use():
    paths = {file.relative_to(ROOT).as_posix(): source for file, source in FILES.items()}
    uses = {path: names for path, source in paths.items() if (names := find_uses(path, source))}
    assert uses == {path: set(names.split()) for path, names in USED.items()}


# Each check, with a changed library


@pytest.fixture
def lines(caplog):
    """Return a function that returns the log lines about missing private names so far."""
    libraries.warn_missing.cache_clear()
    return lambda: [record.getMessage() for record in caplog.records if record.name == "jaxddp.libraries"]


def test_a_missing_private_name_is_logged_once_with_the_version(lines):
    for _ in range(2):
        libraries.warn_missing("jax", "jax._src.one", "starts are slow")
        libraries.warn_missing("no-such-package", "another", "nothing")
    assert lines() == [
        f"jax {jax.__version__} has no usable jax._src.one: starts are slow",
        "no-such-package has no usable another: nothing",
    ]


@pytest.mark.parametrize(
    ("function", "is_recognized"),
    [(lambda b, a, c=None: None, True), (lambda a: None, False), (lambda a, b, d: None, False), (None, False)],
)
def test_a_private_function_is_recognized_by_its_parameters(function, is_recognized, monkeypatch, lines):
    monkeypatch.setattr(cost, "added", function, raising=False)
    found = libraries.private_function("jaxddp.measure.cost:added", ["a", "b"], LOST, ["c"])
    assert found is (function if is_recognized else None)
    missing = f"jax {jax.__version__} has no usable jaxddp.measure.cost.added: {LOST}"
    assert lines() == ([] if is_recognized else [missing])
    assert libraries.private_function("jaxddp.no_module:added", [], LOST) is None


def cost_of_a_matrix_product() -> cost.Cost:
    return cost.compile_with_cost(jax.jit(lambda x: x @ x), jnp.eye(4))[1]


def test_unreadable_operations_of_a_step_are_not_counted_and_logged_once(monkeypatch, lines):
    assert cost_of_a_matrix_product().flops == 2 * 4**3 and lines() == []
    monkeypatch.setattr(cost, "_multiplications", lambda equation: {}["dimension_numbers"])
    costs = [cost_of_a_matrix_product(), cost_of_a_matrix_product()]
    assert [product.flops for product in costs] == [0, 0] and costs[0].utilization(1, 1, "cpu") is None
    (line,) = lines()
    assert line.endswith("the operations of a step are not counted, and MFU is unknown")


def test_unknown_memory_of_a_step_is_no_error_and_logged_once(monkeypatch, lines):
    assert cost_of_a_matrix_product().memory.argument_size_in_bytes == 64
    monkeypatch.setattr(cost, "_BYTES", [*cost._BYTES, "renamed"])
    assert [cost_of_a_matrix_product().memory, cost_of_a_matrix_product().memory] == [None, None]
    (line,) = lines()
    assert "Compiled.memory_analysis()" in line


def test_gloo_that_takes_no_address_is_logged(monkeypatch, lines):
    monkeypatch.setattr("jax._src.lib._jax.make_gloo_tcp_collectives", print)
    membership._set_gloo_address("127.0.0.1")
    (line,) = lines()
    assert line.endswith(": on CPUs the name of each machine must have an address that the others reach")


def test_a_removed_option_is_left_out_and_logged(monkeypatch, lines):
    compilation.unoptimized_options("cpu"), compilation.options_of_one_call("cpu")
    assert lines() == [], "this jaxlib lacks an option"
    removed = {"xla_llvm_disable_expensive_passes", "xla_gpu_deterministic_ops", "xla_cpu_use_fusion_emitters"}
    monkeypatch.setattr(
        compilation, "_rejection_reason", lambda name, value: "No such option" if name in removed else None
    )
    assert compilation.unoptimized_options("cpu") == {"xla_backend_optimization_level": "0"}
    assert compilation._accepted(PLATFORMS["gpu"].reproducible_options, "bits") == {}
    assert [line.partition(" option ")[2] for line in lines()] == [
        "xla_llvm_disable_expensive_passes=True: the self-test takes longer to compile",
        "xla_gpu_deterministic_ops=True: bits",
    ]


@pytest.mark.slow
def test_onnx_is_written_without_the_private_rule(monkeypatch, lines):
    pytest.importorskip("jax2onnx")
    from jax2onnx.plugins.jax.lax import pad

    from jaxddp.inference import exports

    untouched = pad.ir
    with exports._accept_named_sizes_in_pad():
        assert pad.ir is not untouched
    monkeypatch.delattr(pad, "ir")
    with exports._accept_named_sizes_in_pad():
        assert not hasattr(pad, "ir")
    (line,) = lines()
    assert line.startswith("jax2onnx ") and "jax2onnx.plugins.jax.lax.pad.ir" in line
