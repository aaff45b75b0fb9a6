"""The seam to the accelerator: lanes beside compute, and memory that is emptied and filled again. None on a CPU."""
