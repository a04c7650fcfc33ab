"""The lowest layer of the checkpoint engine: configuration, processes, files, sockets, devices, the terminal.

No module here handles weights or imports the project outside this package.
"""
