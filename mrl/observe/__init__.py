"""What a run shows and leaves behind: phase seconds, metrics, samples, a report."""
