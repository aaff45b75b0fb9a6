"""`fullshard plan`: find a sharding strategy that fits, predict its speed, and print the code to use it."""
