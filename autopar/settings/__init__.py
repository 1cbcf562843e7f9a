"""What a user asks for, checked: options, constraints, and the switches that change a program."""
