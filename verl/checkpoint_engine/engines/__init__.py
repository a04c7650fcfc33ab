"""Code that runs inside the processes of inference engines."""
