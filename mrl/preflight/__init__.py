"""`mrl check`: what would stop a run later, found before it starts: configuration, data, models, memory, machines."""
