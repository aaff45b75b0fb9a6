"""The record of a run, the one recorder, and the process's context."""
