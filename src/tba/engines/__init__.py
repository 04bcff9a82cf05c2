"""What samples completions: the Engine protocol, the exact table engine, the transformers engine."""
