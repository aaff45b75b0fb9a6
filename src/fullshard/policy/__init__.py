"""The settings that a user chooses, validated when they are created."""
