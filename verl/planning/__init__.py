"""`verl-sync plan`: predicts the traffic, time and memory of a model's syncs between given hosts."""
