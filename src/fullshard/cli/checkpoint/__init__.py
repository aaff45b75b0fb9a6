"""`fullshard checkpoint`: list, inspect, verify and compare checkpoints and exports; export and import."""
