"""Integrations with other libraries. Each is a separate module that is imported on use only."""
