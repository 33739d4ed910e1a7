"""The peers, one file a library; each suite's `peers` lists those that it measures."""
