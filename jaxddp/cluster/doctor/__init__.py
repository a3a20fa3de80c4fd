"""The checks that `jaxddp doctor` makes before a run."""
