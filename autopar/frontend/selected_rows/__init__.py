"""Rows that a mask selects, `x[mask]`: their number is unknown, so all rows take their place."""
