"""The training loop, and what it validates, saves and reports."""
