"""`mrl check`: find problems of configuration, data, models, memory and machines before a run starts."""
