"""vLLM replicas: requests, samples, and weight updates."""
