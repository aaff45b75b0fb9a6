"""Liveness and progress of ranks: questions and answers outside of the process group."""
