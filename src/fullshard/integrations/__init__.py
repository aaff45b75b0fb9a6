"""Other libraries train with this engine: each in a module of its own, imported only when asked for."""
