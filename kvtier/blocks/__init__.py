"""WHAT is kept: keys, shapes, namespaces and the envelope of a block. Pure functions of bytes and numbers."""
