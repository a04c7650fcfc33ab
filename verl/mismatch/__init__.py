"""`verl-sync mismatch`: find where an engine and a trainer first compute other numbers from the same tokens."""
