"""`fullshard plan`: which way of sharding fits, how fast it will be, and the lines to paste."""
