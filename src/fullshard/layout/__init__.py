"""Pure arithmetic: who owns which rows, and where each parameter lies."""
