"""The trainer behind `fullshard train`: a byte-level GPT, sharded, on any text."""
