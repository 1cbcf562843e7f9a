"""A graph and its decisions to `codegen` programs, whole or stage by stage."""
