"""The commands that look after a data set: check, show and pack."""
