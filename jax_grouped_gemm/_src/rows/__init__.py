"""Routes tokens to experts, and moves their rows there and back."""
