"""A layer whose experts are divided among devices: what travels, and what each of them computes."""
