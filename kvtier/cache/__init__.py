"""WHAT IS TRUE: which copies exist, in which state, and who holds them. No I/O, no clock, no threads."""
