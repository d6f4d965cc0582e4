"""The measuring code of `kvtier bench`; scripts under benchmarks/ use the same."""
