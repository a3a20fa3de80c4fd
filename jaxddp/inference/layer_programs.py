"""The programs that read the layers of a network, and the shapes of their values for one image."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.engine.predictions import LayerProgram, Pool, make_explain, make_features
from jaxddp.models.activations import HEAD, find_layer, heat_map_layer
from jaxddp.setup.classifier import Classifier


@dataclass(frozen=True)
class LayerPrograms:
    """The programs of a network that read its layers. Each program is compiled on first use, and kept.

    Attributes:
        image_shape: (H, W, C) of the network's images.
    """

    classifier: Classifier
    image_shape: tuple[int, int, int]
    _programs: dict[Any, tuple[LayerProgram, Any]] = field(default_factory=dict, repr=False)

    def features(self, name: str | None = HEAD, pool: Pool = "mean") -> tuple[LayerProgram, Any]:
        """Return the program of `make_features` for a layer, and the shape and dtype of the features of one image.

        Raises: see `find_layer`.
        """
        if (name, pool) not in self._programs:
            classifier, layer = self.classifier, find_layer(self.classifier.model, self.image_shape, name)
            program = make_features(classifier.model, classifier.preprocess, layer, pool, classifier.topology)
            shape = layer.shape[-1:] if pool == "mean" else layer.shape
            self._programs[name, pool] = program, jax.ShapeDtypeStruct(shape, jnp.float32)
        return self._programs[name, pool]

    def explain(self, num_classes: int, dtype: Any) -> tuple[LayerProgram, Any]:
        """Return the program of `make_explain`, and the shapes and dtypes of its values for one image.

        Args:
            dtype: the dtype of the pixels.

        Raises: see `heat_map_layer`.
        """
        if "explain" not in self._programs:
            layer = heat_map_layer(self.classifier.model, self.image_shape)
            program = make_explain(self.classifier.objective(), layer, self.classifier.topology)
            of_one = (((num_classes,), jnp.float32), (self.image_shape[:2], jnp.float32), (self.image_shape, dtype))
            self._programs["explain"] = program, tuple(jax.ShapeDtypeStruct(*shape) for shape in of_one)
        return self._programs["explain"]
