"""Other readings of the weights of a trial than as trained."""
