"""What options, checks and memory of a step cost."""
