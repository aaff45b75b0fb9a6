"""Predicted and measured memory of a model, and explanations of it."""
