"""The Python API's functions, and what it makes of their arguments."""
