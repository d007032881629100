"""Contradictions in a configuration. Each file answers: which problems does `mrl check` report for these sections?"""
