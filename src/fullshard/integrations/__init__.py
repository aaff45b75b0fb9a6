"""Integrations with other libraries. Each is a separate module that is only imported when it is used."""
