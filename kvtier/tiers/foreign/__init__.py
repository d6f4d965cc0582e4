"""Blocks between a cache that somebody else keeps on the device, layer by layer, and slots of pinned host memory."""
