"""The processes of a run: their placement, start, restart after losses, and end."""
