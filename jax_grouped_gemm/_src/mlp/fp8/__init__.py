"""The MLP of experts in FP8."""
