"""CUDA graphs of layers beside the schedule: which options fit, and when layers are captured."""
