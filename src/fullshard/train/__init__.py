"""The trainer behind `fullshard train`: it trains a sharded byte-level GPT on any text."""
