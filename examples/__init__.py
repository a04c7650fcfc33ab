"""Small complete extensions, one per guide in docs/how-to. Tested by tests/docs."""
