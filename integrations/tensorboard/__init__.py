"""Writing and reading TensorBoard event files."""
