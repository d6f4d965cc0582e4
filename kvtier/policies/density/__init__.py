"""How likely a block is to be used again, learned from what was: the numbers behind policy `hit_density`."""
