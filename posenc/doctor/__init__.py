"""`posenc doctor`: what every runtime will make of a checkpoint's positions, and the cure."""
