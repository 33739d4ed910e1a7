"""Code that tests share: judges, random inputs, stand-ins, compilation without a GPU."""
