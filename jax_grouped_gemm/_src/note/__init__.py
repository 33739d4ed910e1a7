"""Choices that were made while tracing, of which `explain` tells."""
