"""Symmetric updates of lists of matrices."""
