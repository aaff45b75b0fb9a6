"""State dicts of models and optimizers, and unsharded parameters outside of steps."""
