"""The peak learning rate, which a config may specify for a reference batch size."""

import math

from jaxddp.config import Config


def batch_factor(config: Config) -> float:
    """Return the factor of `optimizer.learning_rate` for a global batch other than `optimizer.reference_batch`.

    Sources: Goyal et al. 2017 (arXiv:1706.02677, section 2.1) for linear scaling, and Krizhevsky 2014 (arXiv:1404.5997)
    for scaling by the square root.
    """
    settings = config.optimizer
    if settings.reference_batch is None or settings.scaling == "none":
        return 1.0
    quotient = config.train.batch_size / settings.reference_batch
    return quotient if settings.scaling == "linear" else math.sqrt(quotient)


def at_batch_size(config: Config) -> Config:
    """Return a config whose `optimizer.learning_rate` is the peak for `train.batch_size`.

    Schedules and optimizers are created from this config. Raises: InputError if the peak is out of range.
    """
    if config.optimizer.reference_batch is None:
        return config
    peak = config.optimizer.learning_rate * batch_factor(config)
    return config.replace(optimizer={"learning_rate": peak, "reference_batch": None})


def derivation(config: Config) -> str | None:
    """Return a line that explains how the peak is computed; None if the config specifies the peak directly."""
    settings, batch = config.optimizer, config.train.batch_size
    if settings.reference_batch is None or settings.scaling == "none":
        return None
    quotient = f"{batch} / {settings.reference_batch}"
    factor = quotient if settings.scaling == "linear" else f"sqrt({quotient})"
    return (
        f"learning rate {settings.learning_rate * batch_factor(config):.6g} = {settings.learning_rate:g} x {factor} "
        f"({settings.scaling}, for optimizer.reference_batch={settings.reference_batch})"
    )
