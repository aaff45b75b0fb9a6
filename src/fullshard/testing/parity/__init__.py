"""Parity of sharded with plain training: `check_parity`, and the command `fullshard parity`."""
