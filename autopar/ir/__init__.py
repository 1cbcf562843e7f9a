"""The words that all passes use: graph, mesh, placements, the chain of units, and what a plan says."""
