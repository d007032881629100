"""`mrl demo`: its model and its configurations. The configuration files in this directory can be read and changed."""
