"""Create the parts of the step from a config."""

import optax

from jaxddp.choices import settings_of
from jaxddp.config import Config
from jaxddp.engine.parts.average import ParameterAverage
from jaxddp.engine.parts.gradient_norm import GradientNorm
from jaxddp.engine.parts.guard import Guard
from jaxddp.engine.parts.lookahead import Lookahead
from jaxddp.engine.parts.loss_scale import LossScale
from jaxddp.engine.parts.part import Part
from jaxddp.engine.parts.plateau import Plateau
from jaxddp.schedules.constant import PlateauSettings


def configured_parts(config: Config, total_steps: int) -> tuple[Part, ...]:
    """Create the optional parts of the step that a config enables, for a run of `total_steps` steps.

    The moving average comes after Lookahead, so that it averages the result of Lookahead. The guard comes after both,
    so that it can restore their arrays. `check_parts` adds the parts that a user provides.
    """
    settings, clip, parts = config.train, config.optimizer.clip_norm, list[Part]()
    if clip is not None or config.log.gradient_norm:
        parts.append(GradientNorm(clip))
    if settings.lookahead is not None:
        parts.append(Lookahead(settings.lookahead, optax.constant_schedule(settings.lookahead_decay), total_steps))
    if settings.ema is not None:
        parts.append(ParameterAverage(settings.ema, every=settings.ema_every, warmup=settings.ema_warmup))
    if config.optimizer.schedule == "plateau":
        plateau = settings_of(config.optimizer, PlateauSettings)
        parts.append(Plateau(plateau.plateau_factor, plateau.plateau_patience, plateau.end_factor))
    if settings.max_bad_steps or settings.precision == "float16":
        parts.append(Guard())
    if settings.precision == "float16":
        parts.append(LossScale(settings.batch_size))
    return tuple(parts)
