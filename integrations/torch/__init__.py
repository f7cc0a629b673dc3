"""Measuring in PyTorch."""
