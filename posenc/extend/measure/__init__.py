"""What a checkpoint does with its positions, measured."""
