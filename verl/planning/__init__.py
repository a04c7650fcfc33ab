"""`verl-sync plan`: what syncs of a model between hosts that are not rented yet would move, take and need."""
