"""One module for each command of `jaxddp`."""
