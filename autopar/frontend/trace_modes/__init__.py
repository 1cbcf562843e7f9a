"""How torch and Python answer a forward while it is traced: one module per subject."""
