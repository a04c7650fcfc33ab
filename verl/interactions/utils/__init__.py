"""verl's place for the registry of interactions."""
