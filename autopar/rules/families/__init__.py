"""The built-in rules, by family of operators."""
