"""`kvtier demo`: a real model answers questions, and a new process answers them again from kept KV."""
