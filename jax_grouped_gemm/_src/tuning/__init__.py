"""Which configuration a product takes in place of the default of its plan."""
