"""XLA options of compiled programs. Each option is tried on a trivial program before a run uses it.

An unknown option in the variable XLA_FLAGS aborts the process. An unknown option of a single program raises an error,
so this module sets options per program. The options are not a stable interface and change between releases of jaxlib.
"""

import functools
from collections.abc import Mapping, Sequence

import jax

import jaxddp.core.libraries as libraries
from jaxddp.config import Config
from jaxddp.core.errors import InputError, Key
from jaxddp.core.wording import show
from jaxddp.engine.buckets import Averaging
from jaxddp.mesh import Topology
from jaxddp.platforms import platform_named

KEY = "parallel.xla_options"
_PREFIX = "xla_"
_NO_EMITTERS = ("xla_cpu_use_fusion_emitters", "False")
"""An option of jaxlib 0.10. Later releases do not have this option and do not need it."""
_BOOLEANS = {"true": "True", "false": "False"}


def compiler_options(words: Sequence[str]) -> dict[str, str]:
    """Parse `("NAME=VALUE", ...)` into the `compiler_options` of `jax.jit`.

    Each option is tried on JAX's default platform. The trial checks only the name and the type of the option. An option
    of another platform is accepted and has no effect.

    Raises:
        InputError: a word is not NAME=VALUE, XLA has no option of this name, the name appears twice, or the value has
            the wrong type.
    """
    options: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name.startswith(_PREFIX):
            raise InputError(Key(KEY), f": {show(word)}", advice=f"give NAME=VALUE, a name that begins with {_PREFIX}")
        # XLA_FLAGS has booleans in lower case, and the options of a single program have them capitalized.
        value = _BOOLEANS.get(value, value)
        if name in options:
            twice = f"{show(options[name])} and {show(value)}"
            raise InputError(Key(KEY), f": {name} is given twice, as {twice}", advice="give one")
        reason = _rejection_reason(name, value)
        if reason is not None:
            raise InputError(
                Key(KEY), f": this jaxlib rejects {show(word)} ({reason})", advice="correct it, or leave it out"
            )
        options[name] = value
    return options


def step_options(config: Config, topology: Topology) -> dict[str, str]:
    """Return the options of the training step.

    On GPUs these are the options that reproducible or bucketed gradients need, if the installed jaxlib accepts them.
    The options of `parallel.xla_options` are added and take precedence.

    Raises:
        InputError: an option of the config is wrong; see `compiler_options`.
    """
    options, platform = {}, platform_named(topology.platform)
    if config.parallel.reproducible:
        options = _accepted(platform.reproducible_options, "parallel.reproducible may not give the same bits twice")
    elif Averaging.of(config, topology).buckets > 1:
        options = _accepted(platform.overlap_options, "gradients may not be averaged while the next ones are computed")
    return options | compiler_options(config.parallel.xla_options)


def options_of_one_call(platform: str) -> dict[str, str]:
    """Return the options of a program that runs once: on a CPU, optimization level 1, which halves the compile time."""
    options = platform_named(platform).single_use_options
    return _accepted(options, "programs take longer to compile at the start of a run")


def unoptimized_options(platform: str) -> dict[str, str]:
    """Return the options of a program that runs once on little data.

    On a CPU the options disable optimization, which reduces the compile time to a fifth. Options that the installed
    jaxlib rejects are left out.
    """
    choices = platform_named(platform)
    options = _accepted(choices.unoptimized_options, "the self-test takes longer to compile")
    uses_emitters = choices.uses_cpu_compiler and not _rejection_reason(*_NO_EMITTERS)
    return options | ({_NO_EMITTERS[0]: _NO_EMITTERS[1]} if uses_emitters else {})


def _accepted(options: Mapping[str, str], consequence: str) -> dict[str, str]:
    """Return the options that the installed jaxlib accepts. Log the consequence of each rejected one."""
    for name, value in options.items():
        if _rejection_reason(name, value) is not None:
            libraries.warn_missing("jaxlib", f"option {name}={value}", consequence)
    return {name: value for name, value in options.items() if _rejection_reason(name, value) is None}


@functools.cache
def _rejection_reason(name: str, value: str) -> str | None:
    """Return the reason why XLA rejects an option, or None if a program compiles with it."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return " ".join(str(error).split())
    return None
