"""`posenc doctor`: say what every runtime makes of a checkpoint's positions, and write a fix."""
