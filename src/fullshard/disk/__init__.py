"""Memory in files: suitable folders, and reads and writes that overlap with computation."""
