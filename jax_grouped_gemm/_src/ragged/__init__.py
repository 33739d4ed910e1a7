"""Ragged products of operands of one dtype."""
