"""AugMix's consistency loss: predictions for an image and for two augmented copies of it should agree.

Source: Hendrycks et al. 2020 (arXiv:1912.02781), section 3. Each image has three views, which share its flip and crop:
one without the policy of `data.augment`, and two with the policy. The loss is the recipe's loss of the first view plus
a weight times the Jensen-Shannon divergence of the three predictions, the mean of KL(p_i || m) over the views i, where
m is the mean of the predictions p_i.

All views of a step go through the network in one batch, as in the authors' code.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxddp.augment.mixing import check_unmixed
from jaxddp.augment.preprocess import Preprocess
from jaxddp.core.errors import InputError, Key
from jaxddp.data.batch import Batch
from jaxddp.data.source import check_one_label
from jaxddp.engine.objective import MetricSums, Objective, TrainObjective

VIEWS = 3

_NAME = Key.plain("objective.name", "jensen_shannon")
# Folded into the run's key for the random numbers of the network in the second and the third view.
_VIEW = 0x6A73


@dataclass(frozen=True)
class JensenShannon:
    """Creates the objective from the supervised objective and the weight of the divergence."""

    consistency_weight: float = 12.0

    reads_unlabelled = False
    """Whether a batch must contain images of `data.unlabelled`."""

    def check(self, supervised: Objective, image: jax.ShapeDtypeStruct, *, unlabelled: bool) -> None:
        """Raise `InputError` if there is no policy, images are mixed, or an image may have several labels."""
        augment = supervised.preprocess.augment
        if not augment.policy:
            raise InputError(_NAME, " compares an image with augmented copies; give ", Key("data.augment.policy"))
        check_unmixed(augment, _NAME)
        check_one_label(supervised.loss.labels, _NAME)

    def __call__(self, supervised: Objective) -> TrainObjective:
        """Return the training objective; see `jaxddp.config.registry.OBJECTIVES`."""

        def objective(
            params: Any, model_state: Any, batch: Batch, *, train: bool, key: Any = None, image_key: Any = None
        ) -> tuple[MetricSums, Any]:
            run_key = jax.random.key(0) if image_key is None else image_key
            inputs = [view(batch, train=train, key=image_key).images for view in views_of(supervised.preprocess)]
            keys = [image_key, *(jax.random.fold_in(run_key, _VIEW + view) for view in range(1, VIEWS))]
            arguments = jnp.concatenate(inputs), [(batch, view_key) for view_key in keys]
            logits, model_state = supervised.logits(params, model_state, *arguments, train=train, key=key)
            first, *_ = views = jnp.split(logits, VIEWS)
            (values, weights), *metrics = supervised.columns(first, batch, None)
            values = values + self.consistency_weight * weights * divergence(views)
            return supervised.sums([(values, weights), *metrics], batch), model_state

        return objective


def views_of(preprocess: Preprocess) -> list[Preprocess]:
    """Return the preprocessing of each view. The random numbers of the views differ only for the policy."""
    plain = replace(preprocess, augment=replace(preprocess.augment, policy=None))
    return [plain, *(replace(preprocess, view=view) for view in range(1, VIEWS))]


def divergence(views: list[jax.Array]) -> jax.Array:
    """Return the Jensen-Shannon divergence of the predictions of each example, float[B], from logits float[B, K]."""
    log_probs = jnp.stack([jax.nn.log_softmax(logits) for logits in views])
    log_mean = jax.nn.logsumexp(log_probs, axis=0) - jnp.log(len(views))
    return (jnp.exp(log_probs) * (log_probs - log_mean)).sum(-1).mean(0)
