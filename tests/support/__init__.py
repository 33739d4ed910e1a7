"""Code that tests share: exact results, random inputs, and compilation without a GPU."""
