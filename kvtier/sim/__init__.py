"""WHAT IF: recorded requests replayed against policies and tiers, with no bytes and no waiting."""
