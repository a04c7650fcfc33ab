"""`python -m verl.doctor`: can this host, or this Ray cluster, run a job, and how fast is what a sync needs of it?"""
