"""A layer whose experts are divided among devices: its communication and its computation."""
