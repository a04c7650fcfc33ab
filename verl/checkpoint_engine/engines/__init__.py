"""What runs inside inference engines."""
