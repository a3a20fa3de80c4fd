"""The launcher, which starts the processes of a job on one machine or, with other launchers, on several machines."""
