"""The benchmark behind `make bench`: this library and other systems in turn, on the same model and data."""
