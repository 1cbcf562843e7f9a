"""Padding of vocabularies, heads and experts to sizes that a degree divides."""
