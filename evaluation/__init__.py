"""Runs, pictures and comparisons made with the toolkit."""
