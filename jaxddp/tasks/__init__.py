"""Training, evaluation and the learning-rate range test, for the command line and the Python API."""
