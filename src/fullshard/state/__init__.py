"""State dicts of models and optimizers, and whole parameters outside of steps."""
