"""Muon: Newton-Schulz iterations of lists of matrices, and the optimiser made of them."""
