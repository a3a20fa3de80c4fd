"""A work directory: whose it is, what it says of its run, and where a run resumes."""
