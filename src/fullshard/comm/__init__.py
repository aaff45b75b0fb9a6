"""The seam to the wire: collectives, by whatever route, and how ranks agree on them."""
