"""The ways to run one attention: reference defines what is correct, the others are cheaper."""
