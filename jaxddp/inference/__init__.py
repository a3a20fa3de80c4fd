"""A trained network is loaded from its run and asked."""
