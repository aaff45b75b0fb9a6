"""Liveness and progress of ranks, communicated outside of the process group."""
