"""TPU chips without JAX: the chips of this machine, and errors with which JAX does not start on them."""
