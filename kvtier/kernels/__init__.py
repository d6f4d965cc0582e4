"""HOW blocks are packed and read: copies of fragments, codecs, checksums and attention over a block table.

`reference` computes everything on the CPU and is the oracle; `src/` holds the same as CUDA C. Nothing here owns memory.
"""
