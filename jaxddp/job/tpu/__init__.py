"""TPU jobs: the place of a process in its slices, Google's metadata server, and notices of an eviction."""
