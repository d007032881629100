"""Starting runs on a cluster: batch scripts for Slurm, jobs for a Ray cluster, and what each node does."""
