"""XLA's options for a compiled program, each tried on a trivial one before a run relies on it.

An unknown option in the variable XLA_FLAGS aborts the process; given to a single program it raises an error, so
options are given that way here. They belong to no stable interface: they change with the releases of jaxlib.
"""

import functools
from collections.abc import Mapping, Sequence

import jax

import jaxddp.core.private_names as private_names
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.core.message import Key
from jaxddp.core.wording import show
from jaxddp.engine.buckets import Averaging
from jaxddp.mesh import Topology

KEY = "parallel.xla_options"
_PREFIX = "xla_"
_OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": "True"}
"""What moves computing between the start of an all-reduce and the wait for it. jaxlib 0.10.2 does so in any case."""
_DETERMINISTIC = {"xla_gpu_deterministic_ops": "True"}
"""Without it XLA chooses between algorithms for GPUs by timing them, and some of them add in no fixed order."""
_ONE_CALL = {"xla_backend_optimization_level": "1"}
_HASTE = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "True"}
_NO_EMITTERS = ("xla_cpu_use_fusion_emitters", "False")
"""Of jaxlib 0.10. From 0.11 on there is no choice, and nothing is lost."""
_BOOLEANS = {"true": "True", "false": "False"}


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """`("NAME=VALUE", ...)` as `jax.jit` takes them in `compiler_options`, each one tried on JAX's default platform.

    Only the form is tried: an option of another platform does nothing. Raises: InputError; not NAME=VALUE,
    a name that XLA does not know or that is there twice, a value of another type.
    """
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.startswith(_PREFIX):
            raise InputError(Key(KEY), f": {show(word)}", advice=f"give NAME=VALUE, a name that begins with {_PREFIX}")
        # In XLA_FLAGS booleans are lower case, for a single program they are not.
        value = _BOOLEANS.get(value, value)
        if name in options:
            twice = f"{show(options[name])} and {show(value)}"
            raise InputError(Key(KEY), f": {name} is given twice, as {twice}", advice="give one")
        reason = _refusal(name, value)
        if reason is not None:
            told = f": this jaxlib refuses {show(word)} ({reason})"
            raise InputError(Key(KEY), told, advice="correct it, or leave it out")
        options[name] = value
    return options


def step_options(config: Config, topology: Topology) -> dict[str, str]:
    """For the training step: what gradients need on GPUs, in buckets or reproducible, if it is taken; then those of the
    config.

    Raises: as `compiler_options`.
    """
    own: dict[str, str] = {}
    if topology.platform == "gpu" and config.parallel.reproducible:
        own = _taken(_DETERMINISTIC, "parallel.reproducible may not give the same bits twice on GPUs")
    elif topology.platform == "gpu" and Averaging.of(config, topology).buckets > 1:
        own = _taken(_OVERLAP, "buckets may not be averaged while the next are computed")
    return own | compiler_options(config.parallel.xla_options)


def options_of_one_call(platform: str) -> dict[str, str]:
    """For a program that is called once: on a CPU level 1 of optimization, which halves compiling, if it is taken."""
    return _taken(_ONE_CALL, "starts take longer to compile") if platform == "cpu" else {}


def options_in_haste(platform: str) -> dict[str, str]:
    """For a program that runs once on a few numbers: on a CPU nothing is optimized, a fifth of the time to compile.

    Those that are taken: they differ between releases of jaxlib.
    """
    if platform != "cpu":
        return {}
    emitters = {} if _refusal(*_NO_EMITTERS) else dict([_NO_EMITTERS])
    return _taken(_HASTE, "the self-test takes longer to compile") | emitters


def _taken(options: Mapping[str, str], lost: str) -> dict[str, str]:
    """Those that this jaxlib takes; a line says what is lost without another."""
    for name, value in options.items():
        if _refusal(name, value) is not None:
            private_names.say_lost("jaxlib", f"option {name}={value}", lost)
    return {name: value for name, value in options.items() if _refusal(name, value) is None}


@functools.cache
def _refusal(name: str, value: str) -> str | None:
    """Why a program cannot be compiled with an option; None where it can."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return " ".join(str(error).split())
    return None
