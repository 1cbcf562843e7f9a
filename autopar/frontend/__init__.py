"""Turn a user's model into a `Graph`: export it at reduced depth, clean the trace, fold repeated layers."""
