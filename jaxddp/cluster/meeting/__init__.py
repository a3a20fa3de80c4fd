"""The coordination of the launchers of several machines, which start and restart a job together."""
