"""`kvtier bench nvme`: the store beside raw I/O, files and its inline kind, each figure beside its goal."""
