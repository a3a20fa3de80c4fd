"""The cost of a step: floating-point operations, memory and time."""
