"""vLLM replicas: requests in, samples out, and the weights that reach them."""
