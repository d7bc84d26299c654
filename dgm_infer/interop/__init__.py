"""Adapters for other libraries: their programs and simulators as models, our posteriors behind their interfaces."""
