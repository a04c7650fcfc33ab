"""For PyPI's verl 0.9: what it calls by names of its configuration. Nothing else imports its package `verl`."""
