"""FP8 layers of few tokens: one custom call, whose kernels sort and quantise tokens."""
