"""The state that a model's forward reads besides parameters: where it is, its values, and how it changes."""
