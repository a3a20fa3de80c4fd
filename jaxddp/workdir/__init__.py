"""The work directory of a run: its lock, its config, its checkpoints, and where a run resumes."""
