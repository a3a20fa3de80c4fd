"""Child processes, one for each compared trainer or measured device limit."""
