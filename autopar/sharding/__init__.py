"""The sharding options of tensors and calls on a mesh, and the shortest ways between placements."""
