"""Training on Ray: the driver, the worker loop, the DeepSpeed engine and checkpoints."""
