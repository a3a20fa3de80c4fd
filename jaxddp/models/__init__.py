"""Network families, each a registered file, and the interface that every network is adapted to."""
