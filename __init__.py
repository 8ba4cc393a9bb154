"""Polypath: one model name over a Ray cluster whose machines differ; every worker's execution path is a value."""
