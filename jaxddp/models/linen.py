"""Linen modules as models."""

from dataclasses import dataclass

import flax.linen as nn
import jax

from jaxddp.models.protocol import Tree, call_mode


@dataclass(frozen=True, eq=False)
class LinenModel:
    """A Linen module: `params` are its collection of that name, `model_state` every other collection that `init` makes.

    Random streams: "dropout" gets `key`; "params", and with it a stream of any other name, a key folded from it.
    """

    module: nn.Module

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        variables = dict(self.module.init(_linen_streams(key), example, **call_mode(self.module.__call__, False)))
        return variables.pop("params", {}), variables

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        logits, updated = self.module.apply(
            {"params": params, **model_state},
            images,
            **call_mode(self.module.__call__, train),
            rngs=_linen_streams(key),
            mutable=list(model_state),
        )
        return logits, {**model_state, **updated} if train else model_state


def _linen_streams(key: jax.Array | None) -> dict[str, jax.Array]:
    # Linen draws a stream that it was not given from "params", with a count of its own for each draw.
    return {} if key is None else {"params": jax.random.fold_in(key, 0), "dropout": key}
