"""FP8 layers of few tokens: one custom call, whose first kernel sorts and quantises tokens."""
