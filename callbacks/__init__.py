"""What a user adds to a training: one module per framework, each importing only its own."""
