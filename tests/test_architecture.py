"""The architecture: the modules and libraries that a module may import, queries of JAX's devices, and lengths.

The package is arranged in layers: a module imports only from layers below its own. `LAYERS` lists the layers.

Every rule is a function of a file's path and source that returns the violations. Tests show that each rule finds a
violation in `BAD` code and none in `GOOD` code. `import_cycles` is the only rule about all files together.
"""

import ast
import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULE_LINES = 600


@dataclass(frozen=True)
class Group:
    """Modules and packages of a layer that may import each other, and the libraries they may import besides NumPy."""

    layer: int
    modules: str
    libraries: str = ""


OF_INFERENCE = "jax PIL jax2onnx jaxlib matplotlib onnx_ir onnxruntime pandas pyarrow sklearn threadpoolctl yaml"
LAYERS = (
    Group(0, "core"),
    Group(1, "config recipe"),
    Group(2, "kernels mesh", "jax optax"),
    Group(2, "data"),
    Group(3, "models platforms", "jax flax"),
    Group(3, "calibration losses metrics", "jax optax"),
    Group(3, "optimizers schedules", "jax optax"),
    Group(3, "augment", "jax"),
    Group(3, "measure", "jax"),
    Group(4, "engine", "jax flax optax"),
    Group(4, "weights", "PIL huggingface_hub ml_dtypes safetensors tqdm"),
    Group(5, "configs"),
    Group(5, "training", "jax IPython PIL clu matplotlib mlflow orbax pandas rich tensorboard wandb"),
    # training/ receives the other processes of a job as an argument from setup/, which joins the job.
    Group(6, "job", "jax"),
    Group(8, "setup workdir", "jax optax"),
    Group(9, "inference", OF_INFERENCE),
    Group(10, "objectives", "jax"),
    Group(11, "arguments", "jax optax"),
    Group(12, "api __init__", "jax optax"),
    Group(12, "cluster"),
    Group(12, "curate"),
    Group(12, "rate_range", "jax"),
    Group(12, "reports", "PIL jinja2 plotly sklearn threadpoolctl umap"),
    Group(13, "sweeps", "optuna"),
    Group(14, "cli command_line commands __main__", "tyro rich"),
)
GROUPS = {place: group for group in LAYERS for place in group.modules.split()}
PACKAGE_INIT = "__init__"

DOORS = {
    "job": {"environment", "membership"},
    # A sweep starts its runs as the launcher starts the processes of a job.
    "cluster": {"launcher", "options", "doctor", "machine", "worker", "worker_group"},
}
"""The modules of the launcher and of the job that the trainer may import. Otherwise it sees other processes through
`jaxddp.core.peers`."""
SEEN = {"job": {"core", "job"}}
"""All that these folders import."""

# Libraries that only this file may import, besides the libraries of its group.
FILE_LIBRARIES = {
    "configs/cifar10_fast.py": "jax optax",
    "configs/cifar10_fast_sgd.py": "jax optax",
    "configs/cifar10_96.py": "jax",
    "configs/imagenet_resnet50_mild.py": "jax optax",
    "jaxddp/cluster/doctor.py": "jax",
    "jaxddp/curate.py": "PIL",
    "jaxddp/calibration.py": "scipy",
    "jaxddp/data/formats/devkit.py": "scipy",
    "jaxddp/data/formats/tfds.py": "tensorflow_datasets",
    "jaxddp/data/images.py": "PIL simplejpeg pillow_heif",
    "jaxddp/data/stream/decode.py": "PIL simplejpeg cv2",
    "jaxddp/data/formats/parquet_files.py": "pyarrow",
    "jaxddp/data/sample.py": "PIL sklearn",
    "jaxddp/data/storage/tables.py": "pyarrow datasets",
    "jaxddp/data/storage/shards.py": "google google_crc32c",
    "jaxddp/data/storage/objects.py": "obstore",
    "jaxddp/data/stream/tf_data.py": "tensorflow",
    "jaxddp/recipe/text.py": "yaml",
    "jaxddp/setup/input_figure.py": "matplotlib",
    "jaxddp/api.py": "matplotlib",
}

DEVICE_FUNCTIONS = {
    *("devices", "local_devices", "device_count", "local_device_count", "default_backend", "distributed"),
    *("process_index", "process_count", "process_indices", "host_id", "host_count", "host_ids"),
}
"""The names of `jax` that only the modules in `DEVICE_MODULES` may use."""
DEVICE_MODULES = ("job", "mesh")
BY_NAME = ("jaxddp/config/registry.py", "jaxddp/cli.py", "jaxddp/core/libraries.py")
"""The modules that import by name: the module of an entry or a command, or one that its user imports for types, too."""
TOOLS = {
    **{"jaxddp.sweeps": "sweeps commands", "jaxddp.reports": "reports sweeps commands"},
    **{f"jaxddp.inference.{tool}": "inference commands" for tool in ("output_files", "probes", "published")},
    "jaxddp.inference.exports": "inference commands api",
}
"""The tools on top of a finished run, and the rooms that may import each."""

SOUND_IMAGES = (
    *("sound_image", "open_sound", "stray_bytes", "parse_header", "check_readable", "decode_pillow", "first_rows"),
    *("without_ancillary_chunks", "ImageHeader", "DOWNLOAD_AGAIN", "JPEG_END", "JPEG_START", "MAX_PIXELS"),
)
"""The names of `data.images` for other modules: these bytes, or what is wrong; those for a check, and for decoding."""

SHARED = {"support", "recipes"}
"""Folders of tests/ without tests: `support` has modules that tests import, and `recipes` has recipe files."""
SCRIPTS = {"benchmarks", "launch", "website"}
TEST_FOLDERS = {"tests", "integration", "conformance"}

# Training on arrays needs these modules. They can be imported without TensorFlow, clu, tyro and rich.
IMPORTED_WITHOUT_LIBRARIES = (
    *("config", "core.duration", "core.errors", "job", "mesh", "models", "engine"),
    *("data.order", "data.arrays", "data.table"),
    *(f"data.formats.{form}" for form in ("ilsvrc", "idx", "cifar", "numpy_files")),
)
IMPORTED_BY_A_RUN = ("training.loop", "training.checkpoints.manager", "setup.run_setup", "api")

Rule = Callable[[str, str], list[str]]


# All rules read the same files, so a file is parsed once.
nodes = functools.cache(lambda source: list(ast.walk(ast.parse(source))))


def imports(path: str, source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, also of imports in functions; `from a import b` is `a.b`."""
    package = path.removesuffix(".py").split("/")
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from jaxddp import losses` imports `jaxddp.api` first, which the package asks for any name.
            names = [base if base == "jaxddp" else f"{base}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name) for name in names)


def module_of(path: str) -> str:
    """Return the entry of `LAYERS` for a path: "engine" for jaxddp/engine/step.py, "configs" for configs/digits.py."""
    folder, _, inside = path.partition("/")
    return folder if folder == "configs" else inside.split("/")[0].removesuffix(".py")


def layer_order(path: str, source: str) -> list[str]:
    """Check that a module imports only from layers below its own and from its own group."""
    group = GROUPS.get(module_of(path))
    if group is None:
        return [f"{path}: {module_of(path)!r} has no layer; give it a group in LAYERS"]
    violations = []
    for line, name in imports(path, source):
        library, _, module = name.partition(".")
        if library != "jaxddp":
            continue
        # `import jaxddp` and `from jaxddp import train` import jaxddp/__init__.py.
        imported_group = GROUPS.get(module.split(".")[0], GROUPS[PACKAGE_INIT])
        if imported_group is not group and imported_group.layer >= group.layer:
            violations.append(
                f"{path}:{line}: {name} is in layer {imported_group.layer}, not below layer {group.layer}"
            )
    return violations


def allowed_libraries(path: str, source: str) -> list[str]:
    """Check that a module imports only the libraries of its group and of its entry in `FILE_LIBRARIES`."""
    allowed = {"jaxddp", "numpy"} | {*GROUPS[module_of(path)].libraries.split(), *FILE_LIBRARIES.get(path, "").split()}
    names = ((line, name.partition(".")[0]) for line, name in imports(path, source))
    return [
        f"{path}:{line}: {name} is not a library of this group"
        for line, name in names
        if name not in sys.stdlib_module_names and name not in allowed
    ]


def tools_on_top(path: str, source: str) -> list[str]:
    """Check that only the rooms of `TOOLS` import the tools on top of a finished run."""
    return [
        f"{path}:{line}: {name} is a tool on top of a finished run, which {module_of(path)} must not need"
        for line, name in imports(path, source)
        for tool, rooms in TOOLS.items()
        if f"{name}.".startswith(f"{tool}.") and module_of(path) not in rooms.split()
    ]


def imports_by_string(path: str, source: str) -> list[str]:
    """Check that no module imports a module by a string, because the other rules would not find such an import."""
    called = ((node.lineno, node.func) for node in nodes(source) if isinstance(node, ast.Call))
    names = ((line, getattr(func, "attr", None) or getattr(func, "id", "")) for line, func in called)
    if path in BY_NAME:
        return []
    return [f"{path}:{line}: {name}" for line, name in names if name in ("import_module", "__import__")]


def doors(path: str, source: str) -> list[str]:
    """Check that only doors are imported: of launcher and job by the trainer (and no trainer by the job), of images."""
    own, violations = module_of(path), []
    for line, name in imports(path, source):
        library, _, module = name.partition(".")
        room, _, inside = module.partition(".")
        is_door = any(f"{inside}.".startswith(f"{door}.") for door in DOORS.get(room, ()))
        if library == "jaxddp" and own not in DOORS and room in DOORS and not is_door:
            violations.append(f"{path}:{line}: {name} is behind a door; see DOORS")
        is_inner = inside.startswith("images.") and inside.rpartition(".")[2] not in SOUND_IMAGES
        if library == "jaxddp" and room == "data" and is_inner:
            violations.append(f"{path}:{line}: {name} is behind the door of sound images; see SOUND_IMAGES")
        if library == "jaxddp" and own in SEEN and room not in SEEN[own]:
            violations.append(f"{path}:{line}: {name} is not seen from {own}/; see SEEN")
    return violations


def device_queries(path: str, source: str) -> list[str]:
    """Check that only job/ and mesh.py query JAX for devices and processes."""
    if module_of(path) in DEVICE_MODULES:
        return []
    aliases = [alias for node in nodes(source) if isinstance(node, ast.Import) for alias in node.names]
    jax_names = {"jax"} | {alias.asname for alias in aliases if alias.name == "jax"}
    named = [(line, name.split(".")[:2]) for line, name in imports(path, source)]
    named += [
        (node.lineno, ["jax", node.attr])
        for node in nodes(source)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in jax_names
    ]
    return [
        f"{path}:{line}: {'.'.join(parts)} belongs in job/ or mesh.py"
        for line, parts in named
        if parts[0] == "jax" and parts[-1] in DEVICE_FUNCTIONS
    ]


def empty_package_inits(path: str, source: str) -> list[str]:
    """Check that the `__init__.py` of a folder imports nothing, so importing one of its modules imports no other."""
    if not path.endswith("/__init__.py") or path in ("jaxddp/__init__.py", "jaxddp/config/__init__.py"):
        return []
    return [f"{path}:{line}: imports {name}" for line, name in imports(path, source)]


def lengths(path: str, source: str) -> list[str]:
    """Check the number of lines of a module."""
    lines = len(source.splitlines())
    return [f"{path}: {lines} lines; the limit is {MODULE_LINES - 1}"] if lines >= MODULE_LINES else []


def shared_test_code(path: str, source: str) -> list[str]:
    """Check that no test file imports a test file. Code that tests share is in tests/support or conftest."""
    file = Path(path)
    if not {*file.parts} & SHARED and file.stem != "conftest" and not file.stem.startswith("test_"):
        return [f"{path}: not a test file; code that tests share belongs in tests/support"]
    return [
        f"{path}:{line}: {name} is in another test file; move shared code into tests/support"
        for line, name in imports(path, source)
        if name.removeprefix("benchmarks.").startswith("test_") or name.partition(".")[0] in TEST_FOLDERS
    ]


def import_cycles(sources: Mapping[str, str]) -> list[str]:
    """Check that no files import each other in a circle; imports in functions and for type checkers count too."""
    files = {name: path for path in sources for name in module_names(path)}

    def file_of(name: str) -> str | None:
        while name and name not in files:
            name = name.rpartition(".")[0]
        return files.get(name)

    imported_files = {path: {file_of(name) for _, name in imports(path, source)} for path, source in sources.items()}
    try:
        TopologicalSorter({path: files - {path, None} for path, files in imported_files.items()}).prepare()
    except CycleError as error:
        return [f"these import each other: {', '.join(error.args[1][1:])}"]
    return []


def module_names(path: str) -> list[str]:
    """Return the names under which a file can be imported, such as "jaxddp.mesh".

    A script's folder is in `sys.path`, so benchmarks/chaos.py is also "chaos".
    """
    folder, *inside = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
    return [".".join([folder, *inside]), *([".".join(inside)] if folder in SCRIPTS else [])]


RULES: dict[Rule, tuple[str, ...]] = {
    layer_order: ("jaxddp", "configs"),
    allowed_libraries: ("jaxddp", "configs"),
    tools_on_top: ("jaxddp", "configs"),
    imports_by_string: ("jaxddp", "configs"),
    doors: ("jaxddp", "configs"),
    device_queries: ("jaxddp", "configs"),
    empty_package_inits: ("jaxddp",),
    lengths: ("jaxddp", "configs", "launch", "benchmarks", "website"),
    shared_test_code: ("tests",),
}

BAD = [
    (layer_order, "jaxddp/engine/step.py", "def f():\n    import jaxddp.api"),
    (layer_order, "jaxddp/inference/trained.py", "from jaxddp import losses"),
    (layer_order, "jaxddp/engine/step.py", "from ..training import loop"),
    (layer_order, "jaxddp/job/control_plane.py", "from jaxddp.workdir.session import session"),
    (layer_order, "jaxddp/new.py", "x = 1"),
    (layer_order, "configs/digits.py", "from jaxddp.training.loop import fit"),
    (allowed_libraries, "jaxddp/config/tree.py", "import jax"),
    (allowed_libraries, "jaxddp/data/stream/pipeline.py", "def f():\n    import tensorflow as tf"),
    (allowed_libraries, "jaxddp/engine/step.py", "if True:\n    from clu import metrics"),
    (allowed_libraries, "configs/digits.py", "import optax"),
    (imports_by_string, "jaxddp/engine/step.py", "import importlib\nimportlib.import_module('clu')"),
    (imports_by_string, "jaxddp/engine/step.py", "__import__('clu')"),
    (doors, "jaxddp/workdir/presence.py", "def f():\n    from jaxddp.job import watchdog"),
    (doors, "jaxddp/job/membership.py", "from jaxddp.config import Config"),
    (doors, "jaxddp/curate.py", "from jaxddp.data.images import verify"),
    (device_queries, "jaxddp/engine/step.py", "import jax\nn = len(jax.devices())"),
    (device_queries, "jaxddp/engine/step.py", "import jax as j\ndef f():\n    return j.local_devices()"),
    (device_queries, "jaxddp/api.py", "import jax\njax.distributed.initialize()"),
    (empty_package_inits, "jaxddp/data/__init__.py", "from jaxddp.data.batch import Batch"),
    (lengths, "jaxddp/engine/step.py", "x = 1\n" * MODULE_LINES),
    (shared_test_code, "tests/test_step.py", "from test_loop import small"),
    (shared_test_code, "tests/small.py", "x = 1"),
    (tools_on_top, "jaxddp/tasks/run_evaluation.py", "def f():\n    from jaxddp.inference import output_files"),
]


def case_id(value: object) -> str | None:
    return getattr(value, "__name__", None) or (str(value)[:40].replace("\n", " ") if isinstance(value, str) else None)


@pytest.mark.parametrize(("rule", "path", "source"), BAD, ids=case_id)
def test_a_violation_is_caught(rule, path, source):
    assert rule(path, source)


IMPORT_CYCLES = [
    {
        "jaxddp/config/__init__.py": "def load():\n    from jaxddp.recipe.file import read",
        "jaxddp/recipe/file.py": "import jaxddp.config",
    },
    {
        "jaxddp/data/labels.py": "if TYPE_CHECKING:\n    from jaxddp.data.source import Source",
        "jaxddp/data/source.py": "from . import rows",
        "jaxddp/data/rows.py": "from .labels import Labels",
    },
    {"jaxddp/data/__init__.py": "from jaxddp.data.a import b", "jaxddp/data/a.py": "from jaxddp.data import b"},
]


@pytest.mark.parametrize("sources", IMPORT_CYCLES, ids=list)
def test_a_circle_of_files_is_caught(sources):
    (violation,) = import_cycles(sources)
    assert all(path in violation for path in sources)
    # There is no circle if any one of the files imports none of the others.
    for path in sources:
        assert import_cycles({**sources, path: "import argparse, jaxddp.core.errors"}) == []


@pytest.mark.slow
def test_no_files_of_the_repository_import_each_other_in_a_circle():
    paths = [path for folder in ("jaxddp", "configs", *SCRIPTS) for path in (ROOT / folder).rglob("*.py")]
    assert import_cycles({path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}) == []


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES, ids=case_id)
def test_the_repository_follows_the_rule(rule):
    files = [file for folder in RULES[rule] for file in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    violations = [
        violation for file in files for violation in rule(file.relative_to(ROOT).as_posix(), file.read_text())
    ]
    assert not violations, "\n".join(violations)


def test_every_group_and_every_file_named_in_the_rules_exists():
    """A rule about a module that no longer exists would check nothing."""
    modules = {module_of(file.relative_to(ROOT).as_posix()) for file in (ROOT / "jaxddp").rglob("*.py")} | {"configs"}
    assert modules == set(GROUPS)
    assert [file for file in FILE_LIBRARIES if not (ROOT / file).is_file()] == []


WATCH = """
import builtins
import sys
from importlib.machinery import PathFinder

class Partial(PathFinder):
    hidden = ()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in cls.hidden else PathFinder.find_spec(name, path, target)

def hide(*libraries):
    # Imports of these libraries fail as if they were not installed.
    Partial.hidden = libraries
    sys.meta_path[sys.meta_path.index(PathFinder)] = Partial

def watch(*libraries, refuse=False):
    # Returns a list to which every import of these libraries by a module of jaxddp is appended, also if the library
    # is already loaded. With `refuse`, these imports fail; other modules may still import the libraries.
    seen, plain_import = [], builtins.__import__

    def watched(name, globals=None, *rest, **named):
        by = (globals or {}).get("__name__", "")
        if by.partition(".")[0] == "jaxddp" and name.partition(".")[0] in libraries:
            seen.append(f"{by} imports {name}")
            if refuse:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])
        return plain_import(name, globals, *rest, **named)

    builtins.__import__ = watched
    return seen
"""


def run_watched(program: str, *arguments: str) -> str:
    """Run a program in a new process, in the root of the repository, and return its output.

    The program may call `hide` and `watch`.
    """
    command = [sys.executable, "-c", WATCH + textwrap.dedent(program), *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def test_hidden_libraries_fail_to_import_and_watched_imports_are_listed():
    printed = run_watched(
        """
        hide("wave")
        try:
            import wave
        except ModuleNotFoundError as error:
            print("hidden:", error.name)
        seen = watch("html")
        exec("import html.parser", {"__name__": "jaxddp.engine.step"})
        exec("import html", {"__name__": "another"})
        print(seen)
        """
    )
    assert printed.splitlines() == ["hidden: wave", "['jaxddp.engine.step imports html.parser']"]


@pytest.mark.slow
def test_importing_jaxddp_starts_no_backend_and_does_not_import_tensorflow():
    printed = run_watched(
        """
        seen = watch("tensorflow", "tensorflow_datasets", "clu", "tyro")
        import jaxddp
        print(seen)
        import jax
        jax.config.update("jax_num_cpu_devices", 3)  # fails if a backend has started
        print(len(jax.devices("cpu")))
        """
    )
    assert printed.splitlines() == ["[]", "3"]


@pytest.mark.slow
def test_arrays_train_without_tensorflow_clu_tyro_and_rich(tmp_path):
    """Flax imports rich, so `watch` makes only the imports of rich by jaxddp fail."""
    modules = [f"jaxddp.{module}" for module in (*IMPORTED_WITHOUT_LIBRARIES, *IMPORTED_BY_A_RUN)]
    kinds = ("models", "losses", "metrics", "optimizers", "schedules", "augment")
    for module in ("job", "engine", "measure", *kinds):
        files = (ROOT / "jaxddp" / module).glob("*.py")
        modules += [f"jaxddp.{module}.{file.stem}" for file in files if file.stem != "__init__"]
    run_watched(
        """
        hide("tensorflow", "tensorflow_datasets", "tensorboard", "clu", "tyro", "obstore", "IPython")
        watch("rich", "PIL", refuse=True)
        import importlib
        workdir, *modules = sys.argv[1:]
        for name in modules:
            importlib.import_module(name)

        import numpy as np
        import optax
        import jaxddp

        rng = np.random.default_rng(0)
        table = jaxddp.ArrayTable(rng.integers(0, 256, (8, 4, 4, 3), np.uint8), np.arange(8) % 2, ("a", "b"))
        model = (
            lambda key, example: {"weight": np.zeros((example[0].size, 2), np.float32)},
            lambda params, images: images.reshape(len(images), -1) @ params["weight"],
        )
        setup = jaxddp.prepare_training(model, table, None, optax.sgd(0.1), 4)
        state, history = jaxddp.train(jaxddp.softmax_cross_entropy, setup, val=table, workdir=workdir)
        assert int(state.step) == 2 and abs(np.asarray(state.params["weight"])).sum() > 0
        assert history.val["count"][-1] == 8
        """,
        str(tmp_path),
        *modules,
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.isdecimal()) == ["2"]
    assert (tmp_path / "metrics.jsonl").read_text()
