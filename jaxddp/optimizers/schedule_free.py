"""AdamW whose parameters are averaged as it goes, in place of a rate that falls."""

import optax
from optax import contrib

from jaxddp.config import Config
from jaxddp.errors import InputError
from jaxddp.optimizers.adamw import EPSILON
from jaxddp.optimizers.decay import add_decay
from jaxddp.registry import OPTIMIZERS
from jaxddp.sections.optimizer import Numbers


@OPTIMIZERS.add("schedule_free")
def schedule_free(config: Config, learning_rate: optax.Schedule) -> optax.GradientTransformation:
    """Schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), as `optax.contrib.schedule_free_adamw`.

    Gradients are taken at y, between the steps z and their average x, which evaluation measures; see
    `jaxddp.engine.parts.schedule_free_average`. Of `optimizer` it reads `momentum` (beta 1, which weighs x in y),
    `beta2`, `epsilon` (1e-8) and `weight_decay`.

    Raises:
        InputError: the rate would fall all the same, or there is no momentum.
    """
    settings = config.optimizer
    numbers = settings.numbers(Numbers(epsilon=EPSILON))
    if settings.schedule != "constant":
        raise InputError(
            f"optimizer.schedule={settings.schedule!r}: schedule_free averages in place of a rate that falls; set it "
            "to constant, which has a warm-up too"
        )
    if not numbers.momentum:
        raise InputError("optimizer.momentum=0.0: schedule_free divides by it; give a number above 0, such as 0.9")
    step = optax.chain(
        optax.scale_by_rms(decay=numbers.beta2, eps=numbers.epsilon, eps_in_sqrt=False, bias_correction=True),
        add_decay(config),
        optax.scale_by_learning_rate(learning_rate),
    )
    return contrib.schedule_free(step, learning_rate, b1=numbers.momentum)
