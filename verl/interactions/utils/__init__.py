"""verl's import path of the registry of interactions."""
