"""The user's options, checked: compile options, constraints, and the switches that change a program."""
