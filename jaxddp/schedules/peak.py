"""The peak of the learning rate, which a config may give for another batch size than its own."""

import math

from jaxddp.config import Config


def batch_factor(config: Config) -> float:
    """What `optimizer.learning_rate` is multiplied by, for a global batch other than `optimizer.reference_batch`.

    Linear is Goyal et al. 2017 (arXiv:1706.02677, section 2.1), the square root Krizhevsky 2014 (arXiv:1404.5997).
    """
    settings = config.optimizer
    if settings.reference_batch is None or settings.scaling == "none":
        return 1.0
    quotient = config.train.batch_size / settings.reference_batch
    return quotient if settings.scaling == "linear" else math.sqrt(quotient)


def at_batch_size(config: Config) -> Config:
    """The config whose `optimizer.learning_rate` is the peak for its own batch size.

    All that makes schedules and optimizers is given this one. Raises: InputError; the peak is out of range.
    """
    if config.optimizer.reference_batch is None:
        return config
    peak = config.optimizer.learning_rate * batch_factor(config)
    return config.replace(optimizer={"learning_rate": peak, "reference_batch": None})


def derivation(config: Config) -> str | None:
    """How the peak comes about, as a line for people; None where the config gives it as it is."""
    settings, batch = config.optimizer, config.train.batch_size
    if settings.reference_batch is None or settings.scaling == "none":
        return None
    quotient = f"{batch} / {settings.reference_batch}"
    shown = quotient if settings.scaling == "linear" else f"sqrt({quotient})"
    return (
        f"learning rate {settings.learning_rate * batch_factor(config):.6g} = {settings.learning_rate:g} x {shown} "
        f"({settings.scaling}, for optimizer.reference_batch={settings.reference_batch})"
    )
