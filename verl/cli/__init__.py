"""`verl-sync`: one command for what this package does."""
