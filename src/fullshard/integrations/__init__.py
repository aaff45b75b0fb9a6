"""Integrations with other libraries, each in a module of its own, imported only when asked for."""
