"""The commands that maintain a data set: check, show and pack."""
