"""What is trained: the objects that a config names or a user gives, and how a run lies over its data and devices."""
