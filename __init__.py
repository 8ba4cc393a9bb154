"""Polypath: one model name over a Ray cluster whose machines differ.

Every worker's execution path is a value.
"""
