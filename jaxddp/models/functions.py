"""Pairs of functions as models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxddp.models.protocol import BY_POSITION, MODE_ARGUMENTS, Tree, call_mode, require, signature


@dataclass(frozen=True, eq=False)
class FunctionModel:
    """A pair of functions, in one of two forms, which differ in how many arguments `apply` takes by position:

    - without state: `init(key, example) -> params`, `apply(params, images) -> logits`;
    - with state: `init(key, example) -> (params, state)`, `apply(params, state, images) -> (logits, state)`.

    `apply` may also take `key`, and its mode by any name in `MODE_ARGUMENTS`; whatever else it takes needs a default.
    """

    init_function: Callable[..., Any]
    apply_function: Callable[..., Any]
    has_state: bool
    takes_key: bool

    @classmethod
    def of(cls, init: Callable[..., Any], apply: Callable[..., Any]) -> "FunctionModel":
        require(init, 2, (), "init(key, example)")
        parameters = signature(apply).parameters.values()
        by_keyword = {p.name for p in parameters} & {"key", *MODE_ARGUMENTS}
        wanted = [p for p in parameters if p.kind in BY_POSITION and p.default is p.empty and p.name not in by_keyword]
        has_state = len(wanted) >= 3
        shapes = "apply(params, images) or apply(params, state, images), either with train and key by keyword"
        require(apply, 3 if has_state else 2, by_keyword, shapes)
        return cls(init, apply, has_state, "key" in by_keyword)

    def init(self, key: jax.Array, example: jax.Array) -> tuple[Tree, Tree]:
        made = self.init_function(key, example)
        return made if self.has_state else (made, {})

    def apply(
        self, params: Tree, model_state: Tree, images: jax.Array, *, train: bool, key: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        keywords = call_mode(self.apply_function, train) | ({"key": key} if self.takes_key else {})
        if not self.has_state:
            return self.apply_function(params, images, **keywords), model_state
        logits, updated = self.apply_function(params, model_state, images, **keywords)
        return logits, updated if train else model_state
