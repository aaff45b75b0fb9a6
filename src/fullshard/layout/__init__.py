"""Pure arithmetic: shard specs, the layout of buffers, and slots."""
