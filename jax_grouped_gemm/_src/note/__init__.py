"""Choices that are made while a function is traced, and that `explain` reports."""
