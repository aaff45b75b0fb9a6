"""What is recorded of a run, and the one recorder."""
