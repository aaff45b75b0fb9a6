"""`fullshard checkpoint`: what is in checkpoints and safetensors files, whether it is intact, and what differs."""
