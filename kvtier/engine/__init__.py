"""WHEN blocks move: plans, the threads that carry them out, and the verbs that callers use."""
