"""Built-in learning rate schedules; each is a registered file."""
