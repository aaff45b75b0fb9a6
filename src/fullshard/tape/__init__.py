"""The trace of a run, the recorder, and values that are kept per default process group."""
