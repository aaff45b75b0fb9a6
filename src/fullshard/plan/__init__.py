"""What a model takes, known beforehand and measured."""
