"""Capture of functions as graphs of tensor operations without autograd, and the ways to run them."""
