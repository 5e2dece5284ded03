"""Attention: the candidates, what each supports, and the function that runs the one asked for."""
