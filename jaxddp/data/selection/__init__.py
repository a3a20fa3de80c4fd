"""Parts of a data set: some classes, a balanced share, a validation split, chosen rows."""
