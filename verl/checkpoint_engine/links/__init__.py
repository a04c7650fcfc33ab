"""How bytes move between members: wires, the fetch loop, forwarding nodes, process groups and liveness."""
