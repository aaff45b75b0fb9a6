"""The benchmark behind `fullshard bench`: this library and its peers, by turns, on the same model and data."""
