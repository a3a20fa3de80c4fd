"""Change the values of an image by a lookup table: autocontrast, equalize, solarize, solarize_add or posterize."""

import jax
import jax.numpy as jnp

from jaxddp.augment.ops.pixel_operation import PixelOperation


def look_up(image: jax.Array, operation: PixelOperation) -> jax.Array:
    """Map the values of each channel of uint8[C, H, W] by a lookup table."""
    channels = len(image)
    # On a CPU, counting and lookup on one flat axis are several times faster than on two axes (channel and value).
    indices = (image.astype(jnp.int32) + 256 * jnp.arange(channels, dtype=jnp.int32)[:, None, None]).reshape(-1)
    histogram = jnp.zeros(256 * channels, jnp.int32).at[indices].add(1, mode="promise_in_bounds")
    histogram = histogram.reshape(channels, 256)
    values = jnp.arange(256, dtype=jnp.int32)
    threshold, dropped = operation.threshold, operation.dropped
    tables = {
        "autocontrast": jax.vmap(_autocontrast_table)(histogram),
        "equalize": jax.vmap(_equalize_table)(histogram),
        "solarize": jnp.where(values < threshold, values, 255 - values),
        "posterize": values >> dropped << dropped,
        "solarize_add": jnp.where(values < 128, jnp.minimum(values + operation.added, 255), values),
    }
    shaped = [jnp.broadcast_to(table, histogram.shape) for table in tables.values()]
    table = jnp.select(operation.matches(*tables), shaped, values).astype(image.dtype)
    return table.reshape(-1).at[indices].get(mode="promise_in_bounds").reshape(image.shape)


def _autocontrast_table(histogram: jax.Array) -> jax.Array:
    """Return the lookup table of autocontrast, int32[256]: the darkest value becomes 0, the brightest 255.

    An image with a single value is not changed.
    """
    values = jnp.arange(256, dtype=jnp.int32)
    low, high = _value_range(histogram)
    stretched = (values - low) * 255 // jnp.maximum(high - low, 1)
    return jnp.where(high > low, jnp.clip(stretched, 0, 255), values)


def _equalize_table(histogram: jax.Array) -> jax.Array:
    """Return the lookup table of equalize, int32[256]: a value becomes the number of darker pixels, scaled to 255."""
    _, high = _value_range(histogram)
    step = (histogram.sum() - histogram[high]) // 255
    below = jnp.cumsum(histogram) - histogram
    spread = (step // 2 + below) // jnp.maximum(step, 1)
    return jnp.where(step > 0, jnp.minimum(spread, 255), jnp.arange(256))


def _value_range(histogram: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the darkest and the brightest value of a histogram."""
    occurs = histogram > 0
    return jnp.argmax(occurs), 255 - jnp.argmax(occurs[::-1])
