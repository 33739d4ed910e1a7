"""What tests have in common: judges, random inputs, stand-ins, compilation without a GPU."""
