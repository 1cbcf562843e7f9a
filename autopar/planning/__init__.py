"""The search over parallel configs, stages and decisions, and the prediction of its plans."""
