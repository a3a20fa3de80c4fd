"""The formats of data sets, one file each, found by `jaxddp.config.registry.FORMATS`."""
