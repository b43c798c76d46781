"""Fine-tune at the new length."""
