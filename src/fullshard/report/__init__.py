"""The page that a run leaves behind: what is recorded while it goes, what that says, and how it is shown."""
