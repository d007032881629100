"""Output of a run: phase timing, metrics, samples, and a report."""
