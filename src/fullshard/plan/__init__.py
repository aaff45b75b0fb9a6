"""The memory that a model needs, predicted and measured, and its explanation in words."""
