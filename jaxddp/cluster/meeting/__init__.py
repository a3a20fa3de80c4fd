"""How the launchers of several machines meet, start the processes of a job together, and start them again."""
