"""XLA's options for a compiled program, each tried on a trivial one before a run relies on it.

An option that XLA does not know aborts the process where the variable XLA_FLAGS names it. Given to a single program it
raises an error, so that is how all of them are given here. XLA's options belong to no stable interface: they come and
go with the releases of jaxlib.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax

from jaxddp.errors import InputError
from jaxddp.wording import show

KEY = "parallel.xla_options"
_PREFIX = "xla_"
_BOOLEANS = {"true": "True", "false": "False"}


@dataclass(frozen=True)
class Option:
    """An option that may make a data-parallel step quicker, and why it may."""

    word: str
    """NAME=VALUE."""
    reason: str


_GRAPHS = "xla_gpu_enable_command_buffer"
WORTH_TRYING: Mapping[str, tuple[Option, ...]] = {
    "gpu": (
        Option("xla_gpu_enable_latency_hiding_scheduler=true", "computes on while the all-reduce is under way"),
        Option("xla_gpu_enable_nccl_user_buffers=true", "NCCL sends the one large buffer from where it lies"),
        Option(
            f"{_GRAPHS}=FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONVOLUTION,COLLECTIVES",
            "a step's hundreds of kernels, convolutions and the all-reduce too, are launched as a few CUDA graphs",
        ),
        Option(f"{_GRAPHS}=", "every kernel is launched by itself, where making graphs costs more than it saves"),
        Option("xla_gpu_experimental_enable_conv_fusion=true", "convolutions take in what stands beside them"),
    ),
}
"""By JAX's name of the platform; none is on unless a run asks for it. A threshold for combining all-reduces is not
among them: gradients travel in one buffer, so there is nothing to combine."""


def accepted(platform: str) -> tuple[Option, ...]:
    """Those worth trying on a platform, "gpu" or "cpu", that this jaxlib takes; on the platform JAX runs on."""
    return tuple(option for option in WORTH_TRYING.get(platform, ()) if _refusal(*_split(option.word)) is None)


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """`("NAME=VALUE", ...)` as `jax.jit` takes them in `compiler_options`, each one tried on JAX's default platform.

    Only the form is tried: an option of another platform is taken, and does nothing.

    Raises:
        InputError: no NAME=VALUE, a name that is none of XLA's or comes twice, a value that is of another type.
    """
    options: dict[str, str] = {}
    for word in words:
        name, value = _split(word)
        if name in options:
            raise InputError(f"{KEY}: {name} is given twice, as {show(options[name])} and {show(value)}; give one")
        reason = _refusal(name, value)
        if reason is not None:
            raise InputError(f"{KEY}: this jaxlib refuses {show(word)} ({reason}); mend it, or leave it out")
        options[name] = value
    return options


def options_of_one_call(platform: str) -> dict[str, str]:
    """For a program that is called once, as `jax.jit` takes them in `compiler_options`.

    On a CPU level 1 of optimization, which halves compiling where this jaxlib takes it; elsewhere none.
    """
    option = ("xla_backend_optimization_level", "1")
    return dict([option]) if platform == "cpu" and _refusal(*option) is None else {}


def _split(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name.startswith(_PREFIX):
        raise InputError(f"{KEY}: {show(word)}; give NAME=VALUE, a name that begins with {_PREFIX}")
    # In XLA_FLAGS booleans are lower case, for a single program they are not.
    return name, _BOOLEANS.get(value, value)


@functools.cache
def _refusal(name: str, value: str) -> str | None:
    """Why a program cannot be compiled with an option; None where it can."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return " ".join(str(error).split())
    return None
