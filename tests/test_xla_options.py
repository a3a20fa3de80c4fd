"""XLA options: tried before use, rejected with one-line messages, and part of the training program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import runs
from support.data import random_table
from support.networks import linear_model
from support.runs import SMALL, fails
from support.shared import sgd

from jaxddp.api import resnet
from jaxddp.config import Config
from jaxddp.core.errors import InputError
from jaxddp.engine.compilation import compiler_options, options_of_one_call
from jaxddp.engine.initial_state import make_init
from jaxddp.mesh import Topology
from jaxddp.models.adapt import adapt
from jaxddp.models.resnet import BASIC, Architecture
from jaxddp.setup.run_setup import RunSetup

TABLE, BATCH = random_table(64), 16
NO_FUSION = "xla_disable_hlo_passes=fusion"
"""An option of the CPU compiler whose effect can be counted in the compiled program."""


def setup_of(words: tuple[str, ...], cache: str = "none", net=None) -> RunSetup:
    data = Config().replace(data={"cache": cache}).data
    model = net or linear_model()
    return runs.setup_of(model, sgd(0.1), TABLE, devices=2, data=data, batch_size=BATCH, xla_options=words)


def fusions(compiled) -> int:
    return compiled.as_text().count(" fusion(")


def test_known_options_are_taken_as_they_are_written():
    words = ("xla_backend_optimization_level=0", "xla_cpu_prefer_vector_width=128", "xla_dump_to=")
    expected = {"xla_backend_optimization_level": "0", "xla_cpu_prefer_vector_width": "128", "xla_dump_to": ""}
    assert compiler_options(words) == expected
    assert compiler_options(()) == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["xla_no_such=1"], r"'xla_no_such=1' cannot be used \(.*No such compile option: 'xla_no_such'\); correct it"),
        (["xla_backend_optimization_level=high"], r"used \(.*'high' is not a valid int32 value\.\)"),
        (["xla_cpu_enable_fast_math=1"], "'1' is not a valid bool value"),
        (["xla_gpu_enable_command_buffer=NO"], "'NO' is not a valid enum value"),
        (["xla_backend_optimization_level"], r"'xla_backend_optimization_level' cannot be used \(expected NAME=VALUE"),
        (["--xla_backend_optimization_level=0"], "expected NAME=VALUE, a name that begins with xla_"),
        (["num_replicas=2"], "expected NAME=VALUE, a name that begins with xla_"),
        (
            ["xla_backend_optimization_level=0", "xla_backend_optimization_level=1"],
            r"xla_backend_optimization_level=1' cannot be used \(the name is given twice\)",
        ),
    ],
)
def test_a_rejected_option_raises_a_one_line_error_with_the_key_and_the_option(words, message):
    with pytest.raises(InputError, match=f"^parallel.xla_options: .*{message}") as error:
        compiler_options(words)
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "device"])
def test_a_run_compiles_its_step_with_its_options(cache):
    """With images in device memory, one program takes several steps, because the network has no convolutions."""
    counts, losses = [], []
    for words in ((), (NO_FUSION,)):
        setup = setup_of(words, cache)
        program, chunks = runs.changed(setup, {"train": {"duration": "40 steps"}}).program()
        chunk = next(chunks(0))
        sums = program(setup.state, *chunk.feed)[1]
        assert (chunk.steps > 1) is (cache == "device")
        counts.append(fusions(program.prepare(setup.state, *chunk.feed)))
        losses.append(np.asarray(sums.values))
    assert counts[0] != counts[1]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)


@pytest.mark.slow
def test_the_initial_state_has_the_same_bits_with_fast_and_with_default_compilation(monkeypatch):
    assert options_of_one_call("gpu") == {}
    assert options_of_one_call("cpu") == {"xla_backend_optimization_level": "1"}
    # Tests compile without optimization, but this one compares two programs as users compile them.
    defaults = {"xla_llvm_disable_expensive_passes": "False", "xla_cpu_use_fusion_emitters": "True"}
    monkeypatch.setattr(
        "jaxddp.engine.initial_state.options_of_one_call", lambda platform: options_of_one_call(platform) | defaults
    )
    optimized = {"xla_backend_optimization_level": "3", **defaults}
    optimizer, key = sgd(0.1, 0.9), jax.random.key(7)
    network = resnet("resnet10", 10, width=8, stem="small").clone(architecture=Architecture((1,), BASIC))
    model = adapt(network)
    state = make_init(model, optimizer, (8, 8, 3), Topology.create(1))(key)
    params, model_state = jax.jit(model.init, compiler_options=optimized)(key, jnp.zeros((1, 8, 8, 3)))
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.model_state), (params, model_state))


@pytest.mark.slow
def test_the_terminal_refuses_an_option_before_it_opens_the_data(tmp_path, capsys):
    words = ["train", "digits", "--data.path", str(tmp_path / "missing"), "--workdir", str(tmp_path / "run"), *SMALL]
    words += ["--parallel.xla-options", "xla_backend_optimization_level=1", "xla_no_such=1", "--seed", "1"]
    assert "--parallel.xla-options: 'xla_no_such=1' cannot be used" in fails(words, capsys)
