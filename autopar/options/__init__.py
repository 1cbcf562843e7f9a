"""How tensors and calls may lie on a mesh: the options of every call, the ways between placements."""
