"""WHICH block leaves: the order in which copies of one tier are given up."""
