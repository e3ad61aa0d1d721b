"""DeepSpeed layers on our backends."""
