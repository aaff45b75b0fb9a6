"""Communication: collectives over any transport, and how ranks agree on them."""
