"""The elementwise steps of an MLP in FP8."""
