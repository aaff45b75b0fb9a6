"""The report of a run: records written during training, their analysis, and the page that shows it."""
