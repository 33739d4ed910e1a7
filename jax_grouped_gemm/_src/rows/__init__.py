"""Routing tokens to experts, and moving their rows there and back."""
