"""Measure models, stores and devices, and log GPUs.

esmeray profile gpu --verify
"""
