"""Random programs, compared with plain PyTorch: the parts of `benchmarks/fuzz.py`."""
