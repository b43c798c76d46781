"""`posenc doctor`: report what every runtime computes from a checkpoint's positions, and write a
fix."""
