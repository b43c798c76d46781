"""The ways to run one attention: reference defines the result, the others are cheaper."""
