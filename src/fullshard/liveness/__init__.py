"""Liveness of ranks, and where each of them is: questions and answers beside the process group."""
