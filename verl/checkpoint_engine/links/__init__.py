"""How members reach each other: wires, holders, the fetch loop, groups and who is alive."""
