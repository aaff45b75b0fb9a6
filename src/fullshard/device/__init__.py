"""The seam to the accelerator: streams beside compute (none on a CPU), and memory that is freed and allocated again."""
