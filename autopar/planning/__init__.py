"""The search over layouts, stages and decisions, and the prediction of what it finds."""
