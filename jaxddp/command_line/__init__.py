"""How a command line is read and checked, and what the terminal shows of it."""
