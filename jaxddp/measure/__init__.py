"""What a step costs: floating-point operations, memory and time."""
