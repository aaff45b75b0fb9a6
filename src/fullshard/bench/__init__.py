"""The benchmark behind `fullshard bench`: this library and its peers, in turn, on the same model and the same data."""
