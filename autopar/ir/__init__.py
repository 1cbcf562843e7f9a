"""Data structures that all passes use: graph, mesh, placements, the chain of units, and the contents of a plan."""
