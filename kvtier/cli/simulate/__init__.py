"""The parts of `kvtier simulate`: what was asked, tables, plots, progress."""
