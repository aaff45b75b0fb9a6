"""Is every rank alive, and where is it? What is asked and answered beside the process group."""
