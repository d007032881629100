"""`mrl verify`: comparison of a parallel layout with transformers."""
