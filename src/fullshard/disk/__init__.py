"""Memory that rests in files: where such files can lie, and reads and writes that go on beside computation."""
