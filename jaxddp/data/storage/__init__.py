"""Where data sets are, and how the bytes of their files are read."""
