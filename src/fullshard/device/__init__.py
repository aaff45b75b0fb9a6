"""The interface to the accelerator: streams next to compute (none on a CPU), and memory that is freed and reused."""
