"""The persistent tier. `store` has the tier itself; the others each hold one noun of it (docs/format.md)."""
