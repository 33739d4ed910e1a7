"""The peers, with a file for each library. The `peers` of a suite lists those that it measures."""
