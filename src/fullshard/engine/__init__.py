"""The sharding engine, from one parameter up to a root and its hooks."""
