"""A sixth way of dividing a step needs one file: here each pair of devices averages its gradients first."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from support.data import NO_AUGMENTATION, random_table
from support.networks import SmallNet, largest_difference
from support.runs import setup_of
from support.shared import sgd

from jaxddp.config import Config
from jaxddp.engine.gradients import Averaging
from jaxddp.engine.step import Phases
from jaxddp.engine.ways.way import Way
from jaxddp.mesh import AXIS
from jaxddp.setup.run_training import make_run
from jaxddp.training.loop import fit

CONFIG = Config().replace(
    train={"duration": "6 steps"}, log={"every": "1 step"}, eval={"every": "0 steps"}, parallel={"self_test": "always"}
)


class PairAveraging(Averaging):
    """Averages the gradients of each pair of neighbours, and then over all devices."""

    def average(self, grads: Any, other_values: Any, order: Sequence[int]) -> tuple[Any, Any, list[jax.Array]]:
        partners = [(device, device ^ 1) for device in range(lax.axis_size(AXIS))]
        grads = jax.tree.map(lambda grad: (grad + lax.ppermute(grad, AXIS, partners)) / 2, grads)
        return super().average(grads, other_values, order)


@dataclass(frozen=True)
class Pairs(Way):
    """Replicas that average over pairs of devices first."""

    @classmethod
    def over(cls, way: Way) -> "Pairs":
        return cls(way.topology, dataclasses.replace(way.gradients, averaging=PairAveraging()))


def test_a_sixth_way_trains_and_needs_one_file():
    with jax.enable_x64(True):
        net, table = SmallNet(dtype=jnp.float64), random_table(48)
        setup = setup_of(net, sgd(0.1), table, devices=4, data=NO_AUGMENTATION, config=CONFIG)
        layout = dataclasses.replace(setup.layout, way=Pairs.over(setup.way))
        state = jax.tree.map(jnp.copy, setup.state)
        pairs = dataclasses.replace(setup, layout=layout, state=state)
        step: Any = pairs.way.step(Phases(setup.supervised, setup.optimizer))
        assert "collective_permute" in step.lower(state, next(setup.batches(0, 1))).as_text()
        states = [fit(make_run(each)) for each in (pairs, setup)]
        assert int(states[0].step) == 6
        assert largest_difference(*(jax.device_get(state.params) for state in states)) < 1e-9
