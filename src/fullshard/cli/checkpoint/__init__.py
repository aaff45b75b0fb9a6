"""`fullshard checkpoint`: what is in checkpoints and exports, whether it is intact, what differs; and imports."""
