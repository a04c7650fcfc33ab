"""What the rooms of the checkpoint engine stand on: configuration, processes, files, sockets, devices, the terminal.

Nothing here knows of weights, and nothing of the project outside of this package.
"""
