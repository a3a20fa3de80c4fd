"""Data sets: what trains, is validated on and is classified, from opening it to batches of its examples."""
