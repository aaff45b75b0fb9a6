"""Whether a model trains sharded as it trains plain: `check_parity`, and the command `fullshard parity`."""
