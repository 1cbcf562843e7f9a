"""The parts of ``cost_models.schedule``, which is the module to import."""
