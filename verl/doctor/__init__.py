"""`python -m verl.doctor`: checks whether this host or Ray cluster can run a job, and measures rates of a sync."""
