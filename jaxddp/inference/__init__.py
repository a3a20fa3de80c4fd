"""A trained network, loaded from its run: predictions, files of them, exported weights and programs."""
