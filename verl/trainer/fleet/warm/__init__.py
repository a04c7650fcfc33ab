"""Ray workers as forks of one process that has imported what they need."""
