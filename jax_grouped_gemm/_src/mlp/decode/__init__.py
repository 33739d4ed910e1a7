"""Layers of few tokens: one custom call, whose kernels sort tokens by expert themselves."""
