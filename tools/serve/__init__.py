"""Serve models over HTTP; send a file to a service, make API keys.

esmeray serve run --serve.models runs/locations facebook/esm2_t6_8M_UR50D
"""
