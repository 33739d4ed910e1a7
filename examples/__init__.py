"""Example programs to copy and change."""
