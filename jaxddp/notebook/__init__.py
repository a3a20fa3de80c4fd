"""The functions of the public Python API, and the checks of their arguments."""
