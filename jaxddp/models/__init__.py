"""Network families, each in a registered file, and the interface to which every network is adapted."""
