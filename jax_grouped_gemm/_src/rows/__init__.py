"""Sorting the rows of a mixture of experts, and moving them to their experts and back."""
