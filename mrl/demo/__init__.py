"""`mrl demo`: its model and its configurations, which are files beside this one and can be read and changed."""
