"""Where data sets are stored (paths, addresses, the catalog), and the stores that read their files."""
