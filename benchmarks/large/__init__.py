"""The model of jobs of up to 100,000 devices."""
