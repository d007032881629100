"""Starting runs on a cluster: batch scripts for Slurm, jobs for a Ray cluster, and the part of each node."""
