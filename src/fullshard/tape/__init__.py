"""The trace of a run, the recorder, and the values kept for the default process group."""
