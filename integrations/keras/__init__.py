"""Measuring in Keras 3."""
