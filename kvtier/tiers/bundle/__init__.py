"""Bundles: blocks of a store as files that can be carried elsewhere. docs/store.md has their bytes."""
