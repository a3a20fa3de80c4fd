"""The places of data sets, and the stores that read the bytes of their files."""
