"""Where trainvet touches other people's programs: measuring in a framework, and writing for TensorBoard."""
