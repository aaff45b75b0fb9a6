"""Other libraries' training loops on this engine: each integration is a module of its own, imported when asked for."""
