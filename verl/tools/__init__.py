"""verl's base class of tools, and what they get and return."""
