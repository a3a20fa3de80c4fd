"""The formats of data sets, one file each, found by `jaxddp.registry.FORMATS`."""
