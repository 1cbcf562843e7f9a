"""Lower a graph and an assignment to `codegen` programs, whole or stage by stage."""
