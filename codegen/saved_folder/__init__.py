"""The run-time modules that a saved folder has, cut to the definitions that its program reaches."""
