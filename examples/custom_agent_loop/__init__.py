"""An agent loop and a tool of one's own, with the YAML files that name them."""
