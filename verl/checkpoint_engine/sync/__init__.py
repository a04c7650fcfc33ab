"""One sync from top to bottom: the manager, its transaction, and the members that take part."""
