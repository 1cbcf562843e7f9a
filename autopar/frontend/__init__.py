"""A model of the user's to a `Graph`: exported at reduced depth, cleaned, repeated layers folded."""
