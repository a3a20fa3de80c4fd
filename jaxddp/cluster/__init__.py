"""The launcher, which starts the processes of a job on a machine, alone or together with other machines."""
